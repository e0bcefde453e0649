from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import inspect
import re
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from celery.app.task import Context
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

import celery_distlock.runtime.app  # noqa: F401  # it registers how requests are distinguished
from celery_distlock import Key
from celery_distlock.arguments import digest
from celery_distlock.errors import ConfigurationError, LockKeyError
from celery_distlock.keys import DEFAULT_TEMPLATE, KeyRule, as_key, key_of, slot_name

# Hypothesis takes it for the strategies' doing if another thread draws a random number then.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")

relaxed = settings(deadline=None)  # a busy machine is no failure


def reserve(sku, quantity=1, *, warehouse="north"): ...


def rule(template, function=reserve):
    return KeyRule(template, task="shop.reserve", signature=inspect.signature(function))


def keys(template, *args, **kwargs):
    return tuple(made.template for made in rule(template).keys(args, kwargs))


def key(template, *args, **kwargs):
    (made,) = keys(template, *args, **kwargs)
    return made


# Templates


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("tee",), {}),
        (("tee", 1), {}),
        ((), {"sku": "tee"}),
        ((), {"quantity": 1, "sku": "tee"}),
        (("tee",), {"warehouse": "north", "quantity": 1}),
    ],
)
@pytest.mark.parametrize("template", ["{sku}:{quantity}@{warehouse}", DEFAULT_TEMPLATE])
def test_however_a_call_is_written_it_has_one_key(template, args, kwargs):
    assert keys(template, *args, **kwargs) == keys(template, "tee", 1, warehouse="north")


def test_a_default_is_in_the_key():
    assert key("{sku}:{quantity}@{warehouse}", "tee") == "tee:1@north"


def test_attributes_items_and_format_specs_work():
    order = {"id": 7}

    assert key("o:{sku.id}", SimpleNamespace(id=7)) == "o:7"
    assert key("o:{sku[id]}", order) == "o:7"
    assert key("o:{sku[0].id}", [SimpleNamespace(id=7)]) == "o:7"
    assert key("{quantity:05d}", "tee", 42) == "00042"
    assert key("{sku!r}", "tee") == "'tee'"


@pytest.mark.parametrize("template", ["{sku:>{quantity}}", "{sku:>{width}}", "{sku:{{}}"])
def test_a_format_that_an_argument_makes_is_refused_for_it_could_fill_the_memory(template):
    with pytest.raises(ConfigurationError, match=r"reserve: lock_key .*"):
        rule(template)


def test_the_refusal_of_a_format_that_an_argument_makes_says_what_to_write():
    with pytest.raises(ConfigurationError, match=r"made from an argument; write the number itself"):
        rule("{sku:>{quantity}}")


@pytest.mark.parametrize("spec", [">1000000000", ".1000000000", "010001d"])
def test_a_format_that_is_wider_than_any_key_should_be_is_refused(spec):
    with pytest.raises(ConfigurationError, match=r"wider than 10000 characters"):
        rule(f"{{sku:{spec}}}")


def test_a_format_may_be_wide():
    assert len(key("{sku:>10000}", "tee")) == 10_000


def test_doubled_braces_are_braces():
    assert key("{{{sku}}}", "tee") == "{tee}"


def test_a_template_without_fields_is_one_lock_for_all_calls():
    assert key("monthly-report", "tee") == key("monthly-report", "cap", 2) == "monthly-report"


def test_task_is_the_name_of_the_task():
    assert key("{task}:{sku}", "tee") == "shop.reserve:tee"


def test_the_default_key_differs_by_arguments():
    first, second = key(DEFAULT_TEMPLATE, "tee"), key(DEFAULT_TEMPLATE, "cap")

    assert first.startswith("shop.reserve:")
    assert first != second


def test_a_parameter_named_task_or_digest_wins():
    def publish(task, digest): ...

    assert rule("{task}/{digest}", publish).keys(("a", "b"), {}) == (Key("a/b"),)


def test_variadic_parameters_can_be_named():
    def collect(*names, **options): ...

    made = rule("{names[1]}:{options[size]}", collect).keys(("a", "b"), {"size": 3})

    assert made == (Key("b:3"),)


def test_a_list_of_templates_gives_each_key_once():
    assert keys(["a:{sku}", "b:{quantity}"], "tee", 2) == ("a:tee", "b:2")
    assert keys(("{sku}", "{warehouse}"), "north") == ("north",)


def test_arguments_that_do_not_fit_are_reported_as_python_does():
    with pytest.raises(TypeError, match=r"shop.reserve\(\) missing a required argument: 'sku'"):
        keys("{sku}")
    with pytest.raises(TypeError, match=r"shop.reserve\(\) got an unexpected .* 'size'"):
        keys("{sku}", "tee", size=1)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{skus}", r"\{skus\}.*did you mean \{sku\}\?"),
        ("{quantity_}", r"did you mean \{quantity\}\?"),
        ("{zzzzzz}", r"can name digest, quantity, sku, task, warehouse"),
        ("{}", "a field without a name"),
        ("{0}", r"\{0\}"),
        ("{sku}{1}", r"\{1\}"),
        ("{self}", r"\{self\}"),
        ("{sku", "does not parse"),
        ("sku}", "does not parse"),
        ("{sku!}", "does not parse"),
        ("{sku!rr}", "does not parse"),
        ("{sku[}", "does not parse"),
        ("", "empty"),
        (["{sku}", ""], "empty"),
        (["{sku}", "{skew}"], r"\{skew\}"),
    ],
)
def test_a_bad_template_is_refused_when_it_is_declared(template, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        rule(template)

    assert "shop.reserve" in str(caught.value)


@pytest.mark.parametrize("template", ["{sku!z}", "{sku.}", "{sku[]}", "{sku:{quantity:{sku}}}"])
def test_what_no_call_could_format_is_refused_when_it_is_declared(template):
    with pytest.raises(ConfigurationError, match="does not parse"):
        rule(template)


@pytest.mark.parametrize("wrong", [None, 7, b"{sku}", [], (), [7], ["{sku}", None], {"{sku}": 1}])
def test_a_rule_of_another_type_is_refused(wrong):
    with pytest.raises(
        ConfigurationError, match="a template, a Key, a list of them, or a callable"
    ):
        rule(wrong)


@pytest.mark.parametrize(
    ("template", "argument"),
    [("{sku.id}", object()), ("{sku[id]}", {}), ("{sku[id]}", 7), ("{sku:d}", "tee")],
)
def test_arguments_without_what_the_template_names_are_an_error_of_the_call(template, argument):
    with pytest.raises(LockKeyError, match="cannot be made from these arguments") as caught:
        keys(template, argument)

    assert caught.value.task == "shop.reserve"
    assert caught.value.__cause__ is not None


def test_a_key_that_turns_out_empty_is_an_error_of_the_call():
    with pytest.raises(LockKeyError, match="empty key"):
        keys("{sku}", "")


# Callables


def test_a_callable_gets_the_call_as_it_was_made():
    def made(sku, quantity=1, *, warehouse="north"):
        return f"{warehouse}/{sku}/{quantity}"

    assert keys(made, "tee", warehouse="south") == ("south/tee/1",)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, ()),
        ([], ()),
        ("a", ("a",)),
        (["a", "b", "a"], ("a", "b")),
        (("a",), ("a",)),
    ],
)
def test_a_callable_may_return_a_key_several_or_none(returned, expected):
    assert keys(lambda *_, **__: returned, "tee") == expected


@pytest.mark.parametrize("returned", [7, b"a", ["a", 7], {"a"}, {"a": 1}, True])
def test_a_callable_that_returns_something_else_is_an_error_of_the_call(returned):
    with pytest.raises(LockKeyError, match="must return a string, a Key, a list of them or None"):
        keys(lambda *_, **__: returned, "tee")


@pytest.mark.parametrize("returned", ["", ["a", ""]])
def test_a_callable_that_returns_an_empty_key_is_an_error_of_the_call(returned):
    with pytest.raises(LockKeyError, match="empty key"):
        keys(lambda *_, **__: returned, "tee")


# How much of them


def terms(template, *args, **kwargs):
    return rule(template).keys(args, kwargs)


def test_a_text_is_a_key_of_which_one_wants_all():
    assert terms("{sku}", "tee") == (Key("tee"),)
    assert terms(lambda *_, **__: "tee", "tee") == (Key("tee"),)


def test_the_template_of_a_key_is_formatted_and_its_terms_stay():
    declared = Key("{sku}:{quantity}", capacity=3, weight=2, min_hold=1.0, cooldown=2.0)

    (made,) = terms(declared, "tee", 5)

    assert made == Key("tee:5", capacity=3, weight=2, min_hold=1.0, cooldown=2.0)


def test_a_key_that_a_callable_returns_is_not_formatted():
    (made,) = terms(lambda *_, **__: Key("{sku}", shared=True), "tee")

    assert made == Key("{sku}", shared=True)


def test_a_list_may_have_texts_and_keys():
    read = Key("{sku}", shared=True)
    expected = (Key("tee", shared=True), Key("all"))

    assert terms([read, "all"], "tee") == expected
    assert terms(lambda *_, **__: [read.of("tee"), "all"], "tee") == expected


def test_one_key_that_is_asked_for_twice_in_one_way_is_one():
    assert terms([Key("{sku}", capacity=2), Key("tee", capacity=2)], "tee") == (
        Key("tee", capacity=2),
    )


@pytest.mark.parametrize(
    "template",
    [
        ["{sku}", Key("tee", capacity=2)],
        [Key("{sku}", cooldown=1.0), "tee"],
        lambda *_, **__: ["tee", Key("tee", shared=True)],
    ],
)
def test_one_key_that_is_asked_for_in_two_ways_is_an_error_of_the_call(template):
    with pytest.raises(LockKeyError, match="lock_key wants 'tee' in two ways") as caught:
        terms(template, "tee")

    assert caught.value.task == "shop.reserve"
    assert "shop.reserve" in str(caught.value)
    assert "Key('tee')" in str(caught.value)


def test_one_template_in_two_ways_is_an_error_of_the_declaration():
    words = r"task shop.reserve: lock_key wants '\{sku\}' in two ways, Key\('\{sku\}'\) and"
    with pytest.raises(ConfigurationError, match=words):
        rule(["{sku}", Key("{sku}", shared=True)])


def test_what_is_wrong_with_a_key_that_a_callable_makes_is_said_with_the_task():
    with pytest.raises(LockKeyError, match=r"shop.reserve: .* capacity is 1 or more") as caught:
        terms(lambda *_, **__: Key("a", capacity=0), "tee")

    assert isinstance(caught.value.__cause__, ConfigurationError)


def test_a_rule_knows_the_keys_that_it_declares():
    shared = Key("{sku}", shared=True)

    assert rule([shared, "all"]).declared == (shared, Key("all"))
    assert rule(lambda *_, **__: shared).declared == ()


@pytest.mark.parametrize("template", [Key("{skew}"), ["all", Key("{sku", shared=True)]])
def test_a_bad_template_of_a_key_is_refused_when_it_is_declared(template):
    with pytest.raises(ConfigurationError, match="task shop"):
        rule(template)


def test_a_key_shows_what_it_says():
    assert repr(Key("a")) == "Key('a')"
    assert repr(Key("a", capacity=3, cooldown=2)) == "Key('a', capacity=3, cooldown=2)"


def test_what_a_callable_raises_is_the_cause():
    def made(sku, quantity=1, *, warehouse="north"):
        raise LookupError("no such product")

    with pytest.raises(LockKeyError, match="LookupError: no such product") as caught:
        keys(made, "tee")

    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize(
    "made",
    [
        lambda: "k",
        lambda sku: "k",
        lambda sku, quantity: "k",
        lambda sku, quantity, warehouse, more: "k",
        lambda sku, quantity, *, warehouse, more: "k",
        lambda sku, *, warehouse: "k",
    ],
)
def test_a_callable_that_cannot_take_the_tasks_parameters_is_refused_when_declared(made):
    with pytest.raises(ConfigurationError, match="cannot be called with the task's own parameters"):
        rule(made)


@pytest.mark.parametrize(
    "made",
    [
        lambda *args, **kwargs: "k",
        lambda sku, *rest, **more: "k",
        lambda sku, quantity=1, *, warehouse="north": "k",
        lambda sku, quantity=1, warehouse="north", more=None: "k",
    ],
)
def test_a_callable_that_can_take_them_is_accepted(made):
    assert rule(made).keys(("tee",), {"warehouse": "south"}) == (Key("k"),)


# Digests


class Level(enum.IntEnum):
    HIGH = 3


same = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ((1, (2, 3)), [1, [2, 3]]),
    ({1: "x"}, {"1": "x"}),
    ({None: 1, True: 2}, {"null": 1, "true": 2}),
    ({1.5: 1, float("inf"): 2}, {"1.5": 1, "Infinity": 2}),
    ({3, 1, 2}, {2, 3, 1}),
    ({1, 2}, frozenset([1, 2])),
    (b"ab", bytearray(b"ab")),
    # What has a shorter way, and what has not.
    (
        {"b": 'x"\u20ac', "a": 1.5, "c": None},
        MappingProxyType({"c": None, "a": 1.5, "b": 'x"\u20ac'}),
    ),
    ({"a": 3, "b": True}, {"b": True, "a": Level.HIGH}),
]
different = [
    *([1, "1"], [1, 1.0], [1, True], [1.0, "1.0"], [None, "null"], [True, "true"]),
    *([[], {}], [[], ""], [[1, 2], [2, 1]], ["a", b"a"], [[[1], 2], [1, [2]]], ["", None]),
    [decimal.Decimal("1.0"), decimal.Decimal("1.00")],
    [datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2)],  # noqa: DTZ001
    [datetime.date(2020, 1, 2), "2020-01-02"],
    [["a", "b"], ["a,b"]],
    [{"a": 1}, {"a": 1, "b": None}],
]


@pytest.mark.parametrize(("one", "other"), same)
def test_what_means_the_same_has_one_digest(one, other):
    assert digest(one) == digest(other)


@pytest.mark.parametrize(("one", "other"), different)
def test_what_differs_has_different_digests(one, other):
    assert digest(one) != digest(other)


def test_a_digest_is_short_and_safe():
    assert re.fullmatch("[0-9a-f]{32}", digest({"a": [1, None]}))


def test_a_digest_is_the_same_in_every_process():
    # Pinned: workers of two versions, or with other hash seeds, have to agree.
    assert digest({"sku": "tee", "n": [1, 2.5, None, True]}) == "845b5b824dabdc47afcaa8eb8eaee9d4"
    assert digest({"sku": "tee", "n": 2.5, "m": None}) == "fcf409b3399934a99157d20347797850"


class Celsius(float):
    pass


class Size(enum.StrEnum):
    LARGE = "L"


@pytest.mark.parametrize(("one", "other"), [(Size.LARGE, "L"), (Level.HIGH, 3), (Celsius(2), 2.0)])
def test_a_subclass_of_a_plain_type_counts_as_that(one, other):
    assert digest(one) == digest(other)


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Jsonable:
    def __json__(self):
        return {"x": 1, "y": 2}


class Model:
    def model_dump(self):
        return {"x": 1, "y": 2}


@pytest.mark.parametrize("value", [Point(1, 2), Jsonable(), Model()])
def test_an_object_that_gives_its_fields_counts_as_them(value):
    assert digest(value) == digest({"x": 1, "y": 2})


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, Point, 1j, [1, {"a": object()}], {object()}]
)
def test_an_object_without_a_stable_form_is_refused(value):
    with pytest.raises(LockKeyError, match="name what identifies it, as in"):
        digest(value)


def test_the_refusal_names_the_task_and_the_type():
    with pytest.raises(
        LockKeyError,
        match=r"shop\.reserve: \{digest\} cannot represent sku, an object of type object",
    ):
        keys(DEFAULT_TEMPLATE, object())


def test_an_argument_that_cannot_give_its_fields_is_an_error_of_the_call():
    class Broken:
        def __json__(self):
            raise LookupError("row is gone")

    with pytest.raises(LockKeyError) as caught:
        keys(DEFAULT_TEMPLATE, Broken())

    assert isinstance(caught.value.__cause__, LookupError)


def test_an_argument_that_contains_itself_is_an_error_of_the_call():
    circle: list = []
    circle.append(circle)

    with pytest.raises(LockKeyError):
        keys(DEFAULT_TEMPLATE, circle)


text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    text,
    st.binary(),
    st.uuids(),
    st.decimals(allow_nan=False),
    st.datetimes(timezones=st.sampled_from([None, datetime.UTC])),
    st.dates(),
    st.times(),
)
numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
field_names = st.one_of(text, numbers, st.booleans(), st.none())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(text, inner),
    ),
    max_leaves=10,
)


@relaxed
@given(st.dictionaries(text, values, max_size=4))
def test_a_digest_survives_the_message(arguments):
    assert digest(loads(dumps(arguments))) == digest(arguments)


@relaxed
@given(field_names, scalars)
def test_field_names_of_every_type_survive_the_message(name, value):
    assert digest(loads(dumps({name: value}))) == digest({name: value})


def test_subclasses_of_what_travels_survive_the_message():
    class Moment(datetime.datetime):
        pass

    class Price(decimal.Decimal):
        pass

    for value in [Moment(2020, 1, 2, tzinfo=datetime.UTC), Price("1.10")]:
        assert digest(loads(dumps(value))) == digest(value)


@relaxed
@given(st.lists(st.tuples(text, st.integers()), unique_by=lambda item: item[0]), st.randoms())
def test_the_order_of_a_dictionary_does_not_matter(items, random):
    shuffled = items[:]
    random.shuffle(shuffled)

    assert digest(dict(items)) == digest(dict(shuffled))


@relaxed
@given(st.text(), st.text())
def test_any_text_has_a_digest_of_its_own(one, other):
    assert (digest(one) == digest(other)) == (one == other)


# Names in Redis

pieces = st.sampled_from(
    [
        *("%", "%%", "%2", "%25", "%7B", "%#", "%u", "%uD800", "{", "}", "{}", "\n", "\r", "\t"),
        *(" ", "\0", "\x7f", "a", "\ud800", "\udfff", "é", "\U0001f512", "|", ":"),
        *("a" * 70, "%" * 40, "x" * 10_000),
    ]
)
hostile = st.one_of(st.text(min_size=1), st.lists(pieces, min_size=1).map("".join))


@relaxed
@given(hostile, hostile)
@example("%7B", "{")
@example("a" * 160, "a" * 161)
@example("%" * 53, "%25" * 53)
@example("\ud800", "\ufffd")
@example("\ud800", "%uD800")
@example("\ud800" * 30, "\ud800" * 31)
def test_two_keys_never_share_a_name(one, other):
    assert (slot_name(one) == slot_name(other)) == (one == other)


@relaxed
@given(hostile)
@example("x" * 10_000)
@example("\0")
@example("%" * 80)
def test_a_name_is_short_and_without_braces_blanks_and_control_characters(key):
    name = slot_name(key)

    assert 0 < len(name) <= 160
    assert not re.search(r"[{}\x00-\x20\x7f]", name)


@relaxed
@given(hostile)
def test_a_name_can_always_be_encoded(key):
    slot_name(key).encode()


@pytest.mark.parametrize("key", ["x" * 10_000, "{" * 100, slot_name("x" * 10_000)])
def test_what_is_shown_of_a_key_means_that_key_and_no_other(key):
    assert slot_name(as_key(key_of(slot_name(key)))) == slot_name(key)


def test_a_short_key_is_readable_in_its_name():
    assert slot_name("stock:tee-größe/7") == "stock:tee-größe/7"
    assert slot_name("a{b}%") == "a%7Bb%7D%25"


def test_the_name_of_a_long_key_begins_as_the_key_does():
    name = slot_name("report:" + "x" * 1000)

    assert name.startswith("report:xxx")
    assert re.search("%#[0-9a-f]{64}$", name)


def test_what_celery_hands_over_in_the_process_has_a_digest():
    def caught() -> tuple[Exception, Any]:
        try:
            raise KeyError("sku")
        except KeyError as error:
            return error, error.__traceback__

    arguments = [Context(id="a", retries=1), *caught()]

    assert digest(arguments) == digest([Context(id="a", retries=1), *caught()])
    assert digest(arguments) != digest([Context(id="b", retries=1), *caught()])
    assert digest(KeyError("sku")) != digest(ValueError("sku"))
    assert digest(KeyError("sku")) != digest(KeyError("other"))
