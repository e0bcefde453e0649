"""The pages in Django's admin as people use them: in Chromium."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from celery import Celery

from celery_distlock import LockedTask, install
from celery_distlock.ops.admin import Admin
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.identities import new_owner
from celery_distlock.testing import FakeClock, Locks
from tests.integration.other_site import other_site

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
expect.set_options(timeout=120_000)

LIST = "/admin/celery_distlock/lock/"
EVERY = ("view", "release", "drop", "limit", "pause")
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg/onload=alert(3)>\n"
    "{{ 7|add:7 }} ä 🔒 \u202e"
)
PEOPLE = f"""
from django.contrib.auth.models import Permission, User
from django.test import Client

people = {{"all": {EVERY!r}, **{{each: ["view", each] for each in {EVERY!r}}}}}
for name, may in people.items():
    user = User.objects.create_user(name, password="correct horse", is_staff=True)
    codes = [f"{{each}}_lock" for each in may]
    user.user_permissions.set(Permission.objects.filter(codename__in=codes))
    client = Client()
    client.force_login(user)
    print(json.dumps([name, client.cookies["sessionid"].value]))
"""


@pytest.fixture(scope="module")
def site(shared_project, tmp_path_factory):
    with shared_project.served(tmp_path_factory.mktemp("site") / "log") as url:
        yield url


@pytest.fixture(scope="module")
def sessions(shared_project):
    """The session of each user, by its name."""
    return dict(shared_project.printed(PEOPLE))


@pytest.fixture
def shop(project):
    """The project's app, on this side."""
    app = Celery("shop", broker=project.url, backend=project.url, set_as_current=False)
    app.conf.distlock_prefix = app.conf.task_default_queue = project.prefix
    install(app)
    yield app
    app.backend.client.close()
    app.close()


@pytest.fixture
def admin(shop):
    return Admin(shop)


@pytest.fixture
def hold(shop):
    """Holds keys until the end of the test."""
    locks = Locks(shop, FakeClock)
    with ExitStack() as stack:
        yield lambda key: stack.enter_context(locks.hold(key))


@pytest.fixture
def call(shop):
    """Sends calls through the store, which wait at their key."""

    @shop.task(base=LockedTask, name="shop.tasks.reserve", lock_key="stock:{sku}", lock_via="store")
    def reserve(sku, note=None):
        pass

    return lambda sku, task_id, note=None: reserve.apply_async([sku, note], task_id=task_id)


@pytest.fixture
def log_in(tab, site, sessions):
    """Gives the browser the session of a user; returns the tab."""

    def log_in(name):
        tab.context.add_cookies([{"name": "sessionid", "value": sessions[name], "url": site}])
        return tab

    return log_in


def open_key(tab, site, key):
    tab.goto(site + LIST)
    tab.get_by_role("link", name=key, exact=True).click()
    expect(tab.get_by_role("heading", name=key, exact=True)).to_be_visible()


def form_of(tab, action):
    tab.get_by_role("heading", name=f"{action}…", exact=True).click()
    form = tab.locator("form").filter(has=tab.get_by_role("button", name=action, exact=True))
    expect(form.get_by_label("Reason")).to_be_visible()
    return form


def state_of(admin, key):
    info, queue = admin.show(key), admin.queue(key)
    return info.limit, info.token, [each.who.task_id for each in queue], admin.actions(key)


def test_a_user_logs_in_finds_a_key_and_reads_its_queue(tab, site, sessions, hold, call):
    hold("stock:A"), hold("order:1")
    for number in range(102):
        call("A", f"call-{number}")
    tab.goto(site + LIST)
    tab.get_by_label("Username").fill("view")
    tab.get_by_label("Password").fill("correct horse")
    tab.get_by_role("button", name="Log in").click()
    expect(tab.get_by_role("link", name="order:1", exact=True)).to_be_visible()

    tab.get_by_label("Keys with this text").fill("stock:?")
    tab.get_by_role("button", name="Search").click()
    expect(tab.get_by_role("link", name="stock:A", exact=True)).to_be_visible()
    assert tab.get_by_role("link", name="order:1", exact=True).count() == 0
    tab.get_by_role("link", name="stock:A", exact=True).click()

    expect(tab.get_by_role("table", name="Holders")).to_contain_text("the-test")
    queue = tab.get_by_role("table", name="Queue")
    expect(queue).to_contain_text("call-99")
    assert queue.get_by_role("row").count() == 101
    tab.get_by_role("link", name="Later in the queue").click()
    expect(queue).to_contain_text("call-101")
    assert queue.get_by_role("row").count() == 3


@pytest.mark.parametrize(
    ("action", "fields", "said"),
    [
        ("Release", {}, "Taken from its holder: stock:A"),
        ("Drop", {}, "Dropped a task that waited for it: stock:A"),
        ("Limit", {"Units": "2", "Rate": "10/s", "For": "15m"}, "Limited: stock:A"),
        ("Pause", {"For": "2h"}, "Paused: stock:A"),
        ("Resume", {}, "Without a limit now: stock:A"),
    ],
)
def test_an_action_needs_its_permission_and_a_reason(
    log_in, site, admin, hold, call, action, fields, said
):
    hold("stock:A")
    call("A", "first"), call("A", "second")
    if action == "Resume":
        admin.limit("stock:A", 1)
    permission = {"Resume": "pause"}.get(action, action.lower())
    others = [each for each in ("release", "drop", "limit") if each != permission]
    before = state_of(admin, "stock:A")
    tab = log_in(others[0])
    open_key(tab, site, "stock:A")
    assert tab.get_by_role("heading", name=f"{action}…", exact=True).count() == 0
    # The forms of the other one; that to ask the holder to leave needs the permission to release.
    assert tab.get_by_role("group").count() == {"release": 2}.get(others[0], 1)

    tab = log_in(permission)
    open_key(tab, site, "stock:A")
    form = form_of(tab, action)
    for label, value in fields.items():
        form.get_by_label(label).fill(value)
    submit = form.get_by_role("button", name=action, exact=True)
    submit.click()
    assert form.get_by_label("Reason").evaluate("field => field.validity.valueMissing")
    assert state_of(admin, "stock:A") == before
    form.get_by_label("Reason").fill("INC-1 <b>stuck</b>")
    submit.click()

    expect(tab.get_by_text(said, exact=True)).to_be_visible()
    expect(tab.get_by_role("table", name="Operators")).to_contain_text("INC-1 <b>stuck</b>")
    act = admin.actions("stock:A")[0]
    assert (act.name, act.author, act.reason) == (
        action.lower(),
        f"{permission} in Django's admin",
        "INC-1 <b>stuck</b>",
    )
    assert state_of(admin, "stock:A") != before


def test_a_wrong_rate_is_named_and_nothing_is_done(log_in, site, admin, hold):
    hold("stock:A")
    tab = log_in("limit")
    open_key(tab, site, "stock:A")
    form = form_of(tab, "Limit")

    form.get_by_label("Rate").fill("often")
    form.get_by_label("Reason").fill("INC-1")
    form.get_by_role("button", name="Limit", exact=True).click()

    expect(tab.locator(".messagelist .error")).to_contain_text("'often'")
    assert admin.show("stock:A").limit is None
    assert not admin.actions("stock:A")


def test_a_link_to_an_action_leads_to_the_key_and_changes_nothing(log_in, site, admin, hold):
    hold("stock:A")
    tab = log_in("all")
    before = state_of(admin, "stock:A")

    for page in "change", "act/pause", "act/release":
        tab.goto(f"{site}{LIST}stock_3AA/{page}/?reason=x&seconds=&units=1")
        expect(tab.get_by_role("heading", name="stock:A", exact=True)).to_be_visible()

    assert state_of(admin, "stock:A") == before


@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
def test_another_site_cannot_act(log_in, site, admin, hold, host):
    hold("stock:A")
    tab = log_in("all")
    attack = f"""<!doctype html><form method=post action="{site}{LIST}stock_3AA/act/pause/">
        <input name=reason value=x><input name=seconds value=""></form>
        <script>document.forms[0].submit()</script>"""

    with (
        other_site(attack) as port,
        tab.expect_response(lambda response: "/act/pause/" in response.url) as answered,
    ):
        tab.goto(f"http://{host}:{port}/")

    assert answered.value.status == 403
    assert admin.show("stock:A").limit is None


@pytest.mark.parametrize("key", [HOSTILE, HOSTILE * 100], ids=["short", "10,000 characters"])
def test_hostile_names_stay_text(log_in, site, admin, hold, call, key):
    owner = new_owner(f"{HOSTILE}[{HOSTILE}]")
    admin.store.acquire(AcquireRequest(f"stock:{key}", owner, 3600.0))
    call(key, HOSTILE.replace("\n", " "), HOSTILE * 100)
    tab = log_in("all")
    tab.goto(site + LIST)
    tab.locator("#content th a").click()
    shown = "<script>alert(1)</script><img" + ("%20" if len(key) > 1000 else " ") + "src=x"
    expect(tab.get_by_role("heading", level=1)).to_contain_text(shown)
    for action in "Pause", "Drop", "Release":
        form = form_of(tab, action)
        form.get_by_label("Reason").fill(HOSTILE.replace("\n", " "))
        form.get_by_role("button", name=action, exact=True).click()
        expect(tab.locator(".messagelist .success")).to_contain_text(shown)
        acts = tab.get_by_role("table", name="Operators")
        expect(acts).to_contain_text("<img src=x onerror=alert(2)>")
        expect(acts).to_contain_text("{{ 7|add:7 }} ä 🔒")

    info = admin.show(f"stock:{key}")
    assert (info.state, info.limit.capacity) == ("free", 0)
    assert not admin.queue(f"stock:{key}")
    assert tab.locator("#content script, #content img, #content svg").count() == 0
