"""The pages in Django's admin: what they show, and what each permission allows."""

from __future__ import annotations

# One process for all requests of a test: Django takes seconds to start on a busy machine.
START = """
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from celery import current_app
from celery_distlock.keys import slot_name
from celery_distlock.ops.admin import Admin
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.identities import new_owner
from shop.tasks import reserve_in_order

admin = Admin(current_app)
LIST = "/admin/celery_distlock/lock/"

def user(*permissions, name="ann", csrf=False):
    found, _ = User.objects.get_or_create(username=name, is_staff=True)
    found.set_password("x")
    found.save()
    names = [f"{each}_lock" for each in permissions]
    found.user_permissions.set(Permission.objects.filter(codename__in=names))
    client = Client(enforce_csrf_checks=csrf, raise_request_exception=False)
    client.force_login(found)
    return client

def address(key, action=""):
    return f"{LIST}{quote(slot_name(key))}/" + (f"act/{action}/" if action else "change/")

def hold(key):
    owner = new_owner("shop.tasks.reserve[an-id]")
    return owner, admin.store.acquire(AcquireRequest(key, owner, 3600.0)).token

def out(*facts):
    print(json.dumps(facts))

FORMS = {
    "limit": {"units": 2, "rate": "10/s", "seconds": "15m"},
    "pause": {"seconds": ""},
    "resume": {},
    "drop": {"task_id": "second"},
    "release": {},
}

def prepared():
    owner, token = hold("stock:A")
    for each in "first", "second":
        reserve_in_order.apply_async(["A"], task_id=each)
    FORMS["release"] = FORMS["recall"] = {"holder": owner, "token": token}
"""
ACTIONS = {
    "limit": "limit",
    "pause": "pause",
    "resume": "pause",
    "drop": "drop",
    "recall": "release",
    "release": "release",
}


def facts(project, code):
    return project.printed(START + code)


def test_each_action_needs_its_own_permission_and_records_its_reason(project):
    code = f"""
prepared()
LogEntry.objects.all().delete()
for action, permission in {ACTIONS!r}.items():
    others = {{"view", "release", "drop", "limit", "pause"}} - {{permission}}
    form = {{**FORMS[action], "reason": f"INC-1 {{action}}"}}
    before = admin.show("stock:A"), len(admin.actions("stock:A"))
    refused = user(*others).post(address("stock:A", action), form).status_code
    unseen = user(*others).get(address("stock:A")).content.decode()
    now = admin.show("stock:A"), len(admin.actions("stock:A"))
    same = [(each.limit, each.token, each.waiting) for each, _ in (before, now)]
    done = user(permission).post(address("stock:A", action), form).status_code
    said = admin.actions("stock:A")[0]
    same = same[0] == same[1] and before[1] == now[1]
    out(action, refused, same, done, said.name, said.author, said.reason)
    out(address("stock:A", action) in unseen)
out(admin.show("stock:A").holder.task_id, [each.who.task_id for each in admin.queue("stock:A")])
out(*(each.change_message for each in LogEntry.objects.order_by("pk")))
"""
    *done, state, logged = facts(project, code)

    author = "ann in Django's admin"
    assert done[::2] == [
        [action, 403, True, 302, action, author, f"INC-1 {action}"] for action in ACTIONS
    ]
    assert done[1::2] == [[False]] * len(ACTIONS)
    assert state == ["first", ["first"]]
    assert logged == [f"{action}: INC-1 {action}" for action in ACTIONS]


def test_nothing_acts_without_post_csrf_token_reason_and_log_in(project):
    code = f"""
prepared()
every = "view", "release", "drop", "limit", "pause"
before = admin.show("stock:A"), admin.queue("stock:A"), admin.actions("stock:A")
client, strict = user(*every), user(*every, name="bob", csrf=True)
outsider = Client()
for action in {list(ACTIONS)!r}:
    url, form = address("stock:A", action), {{**FORMS[action], "reason": "x"}}
    answers = [
        client.get(url, form), client.put(url, form), strict.post(url, form),
        client.post(url, FORMS[action]), client.post(url, {{**form, "reason": "x" * 201}}),
        outsider.post(url, form),
    ]
    out(*(each.status_code for each in answers), "/login/" in answers[-1].url)
client.get(address("stock:A"), FORMS["limit"]), client.post(address("stock:A"), FORMS["limit"])
out(client.post(address("stock:A", "explode"), {{"reason": "x"}}).status_code)
now = admin.show("stock:A"), admin.queue("stock:A"), admin.actions("stock:A")
for lock, queue, acts in before, now:
    out(lock.limit, lock.token, [each.who.task_id for each in queue], acts)
"""
    *answers, unknown, before, after = facts(project, code)

    assert answers == [[302, 302, 403, 302, 302, 302, True]] * len(ACTIONS)
    assert unknown == [404]
    assert before == after
    assert after[2] == ["first", "second"]


def test_the_pages_show_only_to_users_with_that_right(project):
    code = """
prepared()
hold("order:1"), hold("odd / ? # % <b> \\u202e \\ud800 key")
for client in user("view"), user("release", name="bob"), user(name="cid"):
    out(client.get(LIST).status_code, client.get(address("stock:A")).status_code)
client = user("view")
page, index = (client.get(each).content.decode() for each in (LIST, "/admin/"))
out("order:1" in page, "<b>" in page, "/add/" in index)
out("order:1" in client.get(LIST, {"q": "stock"}).content.decode())
out("order:1" in client.get(LIST, {"q": "ord??:*"}).content.decode())
odd = client.get(address("odd / ? # % <b> \\u202e \\ud800 key"))
out(odd.status_code, "an-id" in odd.content.decode())
queue = client.get(address("stock:A")).content.decode()
out(client.get(address("nothing")).status_code, "first" in queue)
out(client.get(LIST + "no/such/page/").status_code)
"""
    viewer, releaser, other, page, search, pattern, odd, free, wrong = facts(project, code)

    assert (viewer, releaser, other) == ([200, 200], [403, 403], [403, 403])
    assert page == [True, False, False]
    assert (search, pattern) == ([False], [True])
    assert odd == [200, True]
    assert free == [200, True]
    assert wrong[0] in (302, 404)


def test_the_lanes_of_a_queue_are_shown(project):
    code = """
from celery_distlock.stores import ParkRequest, SendRequest, Want
hold("stock:A")
for number in range(3):
    want = Want(1, 1, (), 1, ("acme", "zeta")[number % 2], 3000)
    parked = ParkRequest(b"{}", leaves=3600.0)
    request = SendRequest("stock:A", f"{number}:0:0:0", parked, want=want)
    admin.store.calls.send(request)
admin.limit("stock:A", 0, lane="zeta", author="ann")
page = user("view").get(address("stock:A")).content.decode()
admin.limit("stock:A", None, lane="zeta")
lanes, queue = page.partition("<caption>Lanes</caption>")[2].split("<caption>Queue</caption>")
out("<td>acme</td><td>2</td><td>-</td><td>3</td>" in lanes)
out("<td>zeta</td><td>1</td><td>0, paused</td>" in lanes, "lane zeta: paused: no" in page)
out(queue.count("lane acme"), queue.count("<td>in 59m"))
"""
    assert facts(project, code) == [[True], [True, True], [2, 3]]


def test_a_key_that_has_changed_hands_is_not_released(project):
    code = """
owner, token = hold("stock:A")
form = {"holder": owner, "token": token - 1, "reason": "x"}
answer = user("view", "release").post(address("stock:A", "release"), form, follow=True)
out(admin.show("stock:A").state, "Nothing was done" in answer.content.decode())
bad = {"rate": "often", "reason": "x"}
answer = user("view", "limit").post(address("stock:A", "limit"), bad, follow=True)
out(admin.show("stock:A").limit, "often" in answer.content.decode())
"""
    assert facts(project, code) == [["held", True], [None, True]]


def test_a_store_that_is_unreachable_is_named_and_nothing_else_fails(project):
    code = """
client = user("view", "pause")
for page in client.get(LIST), client.get(address("a")):
    out(page.status_code, "127.0.0.1:1" in page.content.decode())
out(client.post(address("a", "pause"), {"reason": "x"}).status_code)
"""
    away = {"CELERY_DISTLOCK_URL": "redis://127.0.0.1:1/0"}

    assert project.printed(START + code, away) == [[503, True], [503, True], [302]]


def test_the_model_has_no_table_and_needs_no_migration(project):
    project.manage("makemigrations", "--check", "--dry-run")
    code = """
from io import StringIO
from django.core.management import call_command
from django.db import connection
for options in {}, {"use_base_manager": True}:
    call_command("dumpdata", stdout=StringIO(), **options)
out([name for name in connection.introspection.table_names() if "distlock" in name])
"""
    assert facts(project, code) == [[[]]]
