"""The page as people see it: in Chromium."""

from __future__ import annotations

import re
import signal
import time

import pytest

from celery_distlock import Lock
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.values import ALONE, ParkRequest, Want
from tests.integration.other_site import other_site
from tests.waiting import wait_until

playwright = pytest.importorskip("playwright.sync_api")
expect, PlaywrightError = playwright.expect, playwright.Error
expect.set_options(timeout=120_000)

TOKEN = "correct horse battery staple"
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg/onload=alert(3)>\n"
    "second \u202e line \ud800"
)


@pytest.fixture
def shown(tab, page_process):
    """The page, open."""
    tab.goto(page_process.url)
    return tab


def key(page, name):
    return page.get_by_role("button", name=name, exact=True)


def choose(page, name):
    key(page, name).click()
    expect(page.get_by_role("heading", name=name, exact=True)).to_be_focused()
    return page.get_by_role("complementary", name=name)


def test_an_empty_store_says_so(shown):
    expect(shown.get_by_text("No key is held or waited for")).to_be_visible()


def test_the_store_and_the_prefix_are_named(shown, admin):
    expect(shown.get_by_role("banner").get_by_text(admin.where, exact=True)).to_be_visible()
    expect(shown.get_by_text(f"waited for at {admin.where}.")).to_be_visible()


def test_the_page_says_how_old_it_is(shown, hold):
    hold("stock:1")
    expect(key(shown, "stock:1")).to_be_visible()
    expect(shown.get_by_text("updated now", exact=True)).to_be_visible()

    shown.get_by_role("button", name="Pause updates").click()

    expect(shown.get_by_text(re.compile(r"^updated \d+ s ago$"))).to_be_visible()


def test_a_key_appears_as_it_is_taken_and_goes_as_it_is_given_back(shown, admin):
    expect(shown.get_by_text("No key is held")).to_be_visible()

    with Lock("stock:1", store=admin.store):
        expect(shown.get_by_role("row").filter(has=key(shown, "stock:1"))).to_contain_text(
            "process"
        )
        expect(shown.get_by_text("1 key", exact=True)).to_be_visible()

    expect(key(shown, "stock:1")).to_be_hidden()


def test_a_pause_holds_the_page_still(shown, hold):
    hold("before")
    expect(key(shown, "before")).to_be_visible()
    shown.get_by_role("button", name="Pause updates").click()
    go_on = shown.get_by_role("button", name="Resume updates")
    expect(go_on).to_be_visible()

    hold("after")

    shown.wait_for_timeout(1000)  # five times as long as a look is apart from the next
    expect(key(shown, "after")).to_be_hidden()
    go_on.click()
    expect(shown.get_by_role("button", name="Pause updates")).to_be_visible()
    expect(key(shown, "after")).to_be_visible()


def test_a_search_narrows_the_list(shown, hold):
    for name in ("stock:1", "stock:2", "order:1"):
        hold(name)
    expect(key(shown, "order:1")).to_be_visible()

    shown.get_by_role("searchbox", name="Search").fill("STOCK")

    expect(key(shown, "order:1")).to_be_hidden()
    expect(key(shown, "stock:1")).to_be_visible()
    expect(shown.get_by_text("2 of 3 keys")).to_be_visible()


def test_a_column_sorts_and_says_so(shown, hold):
    for name in ("b", "a", "c"):
        hold(name)
    expect(shown.locator(".key")).to_have_count(3)
    header = shown.get_by_role("columnheader", name="Key")

    header.get_by_role("button").click()
    expect(header).to_have_attribute("aria-sort", "ascending")
    expect(shown.locator(".key")).to_have_text(["a", "b", "c"])

    header.get_by_role("button").click()
    expect(shown.locator(".key")).to_have_text(["c", "b", "a"])


def test_a_release_asks_names_the_holder_and_releases(shown, hold, admin):
    hold("stuck")
    details = choose(shown, "stuck")
    pid = admin.show("stuck").holder.pid

    details.get_by_role("button", name="Release").click()
    dialog = shown.get_by_role("dialog", name="Release this key?")
    expect(dialog).to_contain_text(f"process {pid}")
    expect(dialog).to_contain_text("two may run")
    assert admin.show("stuck").state == "held"
    dialog.get_by_role("textbox", name="Reason").fill("INC-1 <b>hangs</b>")
    dialog.get_by_role("button", name="Release it").click()

    expect(shown.get_by_role("status")).to_contain_text("Released: thread the-test")
    assert admin.show("stuck").state == "free"
    details.get_by_text("Operators (1)").click()
    acts = details.get_by_role("list", name="Operators")
    expect(acts).to_contain_text("release from thread the-test")
    expect(acts).to_contain_text(": INC-1 <b>hangs</b>")
    expect(details.get_by_text("free", exact=True)).to_be_visible()


def test_several_holders_are_shown_and_one_of_them_is_released(shown, share, admin):
    share("tenant:7", "one", Want(2, 5))
    second = share("tenant:7", "two", Want(1, 5))
    details = choose(shown, "tenant:7")
    row = shown.get_by_role("row").filter(has=key(shown, "tenant:7"))
    expect(row).to_contain_text("shop.f +1")
    expect(details.get_by_text("3 of 5 units in use", exact=True)).to_be_visible()
    holders = details.get_by_role("list", name="Holders")
    expect(holders.get_by_role("listitem")).to_have_count(2)
    expect(holders).to_contain_text("2 units, for")
    expect(holders).to_contain_text("1 unit, slot 0, for")
    expect(details.get_by_role("button", name="Release", exact=False)).to_have_count(2)

    holders.get_by_role("button", name="Release shop.f[one]").click()
    dialog = shown.get_by_role("dialog", name="Release this key?")
    expect(dialog).to_contain_text("shop.f[one]")
    expect(dialog).to_contain_text("Its other holders keep what they have.")
    dialog.get_by_role("button", name="Release it").click()

    expect(shown.get_by_role("status")).to_contain_text("Released: shop.f[one] has lost tenant:7")
    assert [hold.who.owner for hold in admin.show("tenant:7").holds] == [second]
    expect(holders.get_by_role("listitem")).to_have_count(1)


@pytest.mark.parametrize("want", [ALONE, Want(1, 5)], ids=["exclusive", "shared"])
def test_a_holder_that_is_asked_to_leave_shows_when_and_by_what(shown, share, admin, want):
    share("tenant:7", "one", want)
    admin.recall("tenant:7")

    details = choose(shown, "tenant:7")

    expect(details.get_by_text("Asked to leave", exact=False)).to_be_visible()
    expect(details.get_by_text(", by an operator", exact=False)).to_be_visible()


def test_units_have_a_column_where_a_key_is_shared(shown, share, hold):
    hold("stock:1")
    expect(key(shown, "stock:1")).to_be_visible()
    units = shown.get_by_role("columnheader", name="Units")
    expect(units).to_be_hidden()

    share("tenant:7", "one", Want(2, 5))

    expect(units).to_be_visible()
    row = shown.get_by_role("row").filter(has=key(shown, "tenant:7"))
    expect(row.get_by_text("2/5", exact=True)).to_be_visible()
    row = shown.get_by_role("row").filter(has=key(shown, "stock:1"))
    expect(row.get_by_text("exclusive", exact=True)).to_be_visible()


def test_a_paused_key_shows_the_author_of_the_pause(shown, share, admin):
    admin.limit("tenant:7", 0, author="<b>ann</b>@vm")
    row = shown.get_by_role("row").filter(has=key(shown, "tenant:7"))
    expect(row.get_by_text("paused", exact=True)).to_be_visible()

    details = choose(shown, "tenant:7")

    expect(details.get_by_text("0: paused, by <b>ann</b>@vm, since ")).to_be_visible()
    admin.limit("tenant:7", None)
    expect(key(shown, "tenant:7")).to_be_hidden()


def test_a_key_is_paused_limited_and_resumed_and_the_actions_are_listed(shown, share, admin):
    share("tenant:7", "one", Want(2, 5))
    details = choose(shown, "tenant:7")
    dialog, status = shown.get_by_role("dialog"), shown.get_by_role("status")
    expect(details.get_by_role("button", name="Resume")).to_be_hidden()

    details.get_by_role("button", name="Pause").click()
    expect(dialog.get_by_role("textbox", name="Units")).to_be_hidden()
    dialog.get_by_role("textbox", name="Reason").fill("INC-4 <i>")
    dialog.get_by_role("button", name="Pause it").click()
    expect(status).to_contain_text("Paused: tenant:7.")
    expect(details.get_by_text("0: paused, by ")).to_be_visible()
    assert admin.show("tenant:7").limit.until == 0

    details.get_by_role("button", name="Limit").click()
    dialog.get_by_role("textbox", name="Units").fill("three")
    dialog.get_by_role("button", name="Limit it").click()
    expect(status).to_contain_text("must be a whole number")
    details.get_by_role("button", name="Limit").click()
    dialog.get_by_role("textbox", name="Units").fill("3")
    dialog.get_by_role("textbox", name="Starts").fill("100/m")
    dialog.get_by_role("textbox", name="minutes").fill("10")
    dialog.get_by_role("button", name="Limit it").click()
    expect(details.get_by_text("3 units, 100/m, by ")).to_be_visible()

    details.get_by_role("button", name="Resume").click()
    expect(dialog).to_contain_text("It was: 3 100/m, by ")
    dialog.get_by_role("button", name="Remove it").click()
    expect(status).to_contain_text("tenant:7 has no limit")
    assert admin.show("tenant:7").limit is None
    shown.get_by_text("Operators in the last day").click()
    acts = shown.get_by_role("list", name="Operators in the last day").get_by_role("listitem")
    expect(acts).to_have_count(3)
    expect(acts.nth(2)).to_contain_text("tenant:7: pause")
    expect(acts.nth(2)).to_contain_text("INC-4 <i>")


def test_what_a_holder_may_let_in_sooner_comes_at_the_latest_when_the_limit_ends(
    shown, share, admin
):
    for task in ("one", "two", "three"):
        share("tenant:7", task, Want(1, 5))
    admin.limit("tenant:7", 2, seconds=3540.0)
    park = AcquireRequest("tenant:7", "", 60.0, ParkRequest(b""), run="t:0:0:0", want=Want(1, 5))
    admin.store.acquire(park)
    row = shown.get_by_role("row").filter(has=key(shown, "tenant:7"))
    expect(row.get_by_text(re.compile(r"^next in 5\d min \d+ s at the latest$"))).to_be_visible()

    details = choose(shown, "tenant:7")

    expect(details.get_by_text(re.compile(r"^in 5\d min \d+ s at the latest$"))).to_be_visible()
    admin.store.parking.cancel("tenant:7", "t:0:0:0")
    admin.limit("tenant:7", None)


def test_a_key_says_how_often_an_operator_lets_it_be_taken(shown, share, admin):
    share("tenant:7", "one", Want(2, 5))
    admin.limit("tenant:7", 3, rate="100/m", author="ann@vm")
    row = shown.get_by_role("row").filter(has=key(shown, "tenant:7"))
    expect(row.get_by_text("limit 3 100/m", exact=True)).to_be_visible()

    details = choose(shown, "tenant:7")

    expect(details.get_by_text("3 units, 100/m, by ann@vm, since ")).to_be_visible()
    admin.limit("tenant:7", None)


@pytest.mark.parametrize("how", ["button", "Escape", "Enter"])
def test_a_release_that_is_cancelled_does_nothing(shown, hold, admin, page_process, how):
    hold("busy")
    choose(shown, "busy").get_by_role("button", name="Release").click()
    dialog = shown.get_by_role("dialog")

    if how == "button":
        dialog.get_by_role("button", name="Cancel").click()
    else:
        expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
        shown.keyboard.press(how)

    expect(dialog).to_be_hidden()
    assert admin.show("busy").state == "held"
    assert "released" not in page_process.log()


def test_all_of_a_release_can_be_done_by_keyboard(shown, hold, admin):
    hold("stuck")
    expect(key(shown, "stuck")).to_be_visible()

    shown.keyboard.press("/")
    expect(shown.get_by_role("searchbox")).to_be_focused()
    key(shown, "stuck").focus()
    shown.keyboard.press("Enter")
    expect(shown.get_by_role("heading", name="stuck")).to_be_focused()
    for _ in range(3):  # past the buttons that close the details, and ask the holder to leave
        shown.keyboard.press("Tab")
    shown.keyboard.press("Enter")
    expect(shown.get_by_role("button", name="Cancel")).to_be_focused()
    shown.keyboard.press("Tab")
    shown.keyboard.press("Enter")

    expect(shown.get_by_role("status")).to_contain_text("Released")
    assert admin.show("stuck").state == "free"


def test_a_queue_is_shown_and_a_task_dropped_from_it(shown, locked, worker):
    worker("tests.apps.locked", concurrency=2)
    first = locked.work_requeue.delay("queued", 0, "open")
    locked.journal.wait("queued")
    parked = locked.work_requeue.delay("queued", 1)
    details = choose(shown, "queued")
    entry = details.get_by_role("listitem").filter(has_text=parked.id)
    expect(entry).to_contain_text("parked")

    entry.get_by_role("button", name=f"Drop work_requeue[{parked.id}]").click()
    shown.get_by_role("dialog").get_by_role("button", name="Drop it").click()

    expect(shown.get_by_role("status")).to_contain_text("Dropped: work_requeue")
    expect(details.get_by_text("No waiters.")).to_be_visible()
    assert parked.state == "REVOKED"
    locked.journal.open("open")
    first.get(timeout=60)


def test_a_hostile_key_is_text_everywhere(shown, hold, admin):
    hold(HOSTILE)
    text = r"\nsecond \u202e line \ud800"

    expect(shown.locator(".key")).to_contain_text("<img src=x onerror=alert(2)>")
    expect(shown.locator(".key")).to_contain_text(text)
    shown.locator(".key").click()
    expect(shown.get_by_role("heading", level=2)).to_contain_text(text)
    shown.get_by_role("button", name="Release").click()
    expect(shown.get_by_role("dialog")).to_contain_text(text)
    shown.get_by_role("button", name="Release it").click()
    expect(shown.get_by_role("status")).to_contain_text(text)

    assert admin.show(HOSTILE).state == "free"
    assert shown.locator("main img, main svg, main script").count() == 0


def test_text_cannot_become_html_even_if_the_page_were_wrong(shown):
    with pytest.raises(PlaywrightError, match="TrustedHTML"):
        shown.evaluate("document.body.innerHTML = '<img src=x onerror=window.ran=1>'")


def test_a_store_that_is_unreachable_is_shown_and_comes_back(tab, start_page, private_server):
    server = private_server()
    page = start_page(DISTLOCK_TEST_STORE=server.url)
    tab.goto(page.url)
    expect(tab.get_by_text("No key is held")).to_be_visible()

    server.stop()
    expect(tab.get_by_role("alert").first).to_contain_text(
        re.compile(
            r"^The lock store does not answer, since .*\. Still trying; the data below is older"
        )
    )
    server.start()

    expect(tab.get_by_text("The lock store does not answer")).to_be_hidden()


def test_a_page_whose_server_ended_goes_on_with_the_next(tab, start_page, hold):
    hold("stuck")
    page = start_page()
    tab.goto(page.url)
    expect(key(tab, "stuck")).to_be_visible()

    page.stop()
    expect(tab.get_by_role("alert").first).to_contain_text("The page's server does not answer")
    start_page("--port", str(page.port))
    expect(tab.get_by_text("The page's server does not answer")).to_be_hidden()

    choose(tab, "stuck").get_by_role("button", name="Release").click()
    tab.get_by_role("button", name="Release it").click()
    expect(tab.get_by_role("status")).to_contain_text("Released")


def test_a_read_only_page_has_no_buttons_that_change(tab, start_page, hold):
    hold("stuck")
    tab.goto(start_page("--read-only").url)

    details = choose(tab, "stuck")

    expect(details.get_by_text("Held for")).to_be_visible()
    for name in ("Release", "Pause", "Limit", "Wake"):
        expect(details.get_by_role("button", name=name)).to_be_hidden()
    expect(tab.get_by_text("read-only")).to_be_visible()


def test_the_token_opens_the_page_and_a_logout_closes_it(tab, start_page, hold):
    hold("secret key")
    tab.goto(start_page(DISTLOCK_WEB_TOKEN=TOKEN).url)

    tab.get_by_label("Token").fill("a wrong token")
    tab.get_by_role("button", name="Log in").click()
    expect(tab.get_by_text("The token is wrong.", exact=True)).to_be_visible()
    assert key(tab, "secret key").count() == 0
    tab.get_by_label("Token").fill(TOKEN)
    tab.keyboard.press("Enter")
    expect(key(tab, "secret key")).to_be_visible()
    tab.reload()
    expect(key(tab, "secret key")).to_be_visible()
    assert TOKEN not in tab.evaluate("document.cookie + location.href")

    tab.get_by_role("button", name="Log out").click()
    expect(tab.get_by_label("Token")).to_be_visible()
    assert key(tab, "secret key").count() == 0


def test_a_narrow_screen_is_not_scrolled_sideways(shown, hold):
    hold("x" * 150)
    hold("stock:1")
    shown.set_viewport_size({"width": 320, "height": 640})

    choose(shown, "stock:1")

    width = shown.evaluate("document.documentElement.scrollWidth")
    assert width <= 320
    expect(shown.get_by_role("cell").first).to_be_visible()


def widths(page) -> dict[str, float]:
    """How wide the columns are that are shown."""
    cells = page.locator("tbody tr").first.get_by_role("cell").all()
    boxes = [(cell.get_attribute("class"), cell.bounding_box()) for cell in cells]
    return {name.split()[0].removeprefix("c-"): box["width"] for name, box in boxes if box}


@pytest.mark.parametrize("width", [820, 1000, 1280, 1440, 1920])
def test_the_keys_have_the_widest_column_with_the_details_open_too(shown, hold, width):
    shown.set_viewport_size({"width": width, "height": 800})
    hold("customer:000001:invoice")
    expect(key(shown, "customer:000001:invoice")).to_be_visible()
    alone = widths(shown)

    choose(shown, "customer:000001:invoice")

    for shares in (alone, widths(shown)):
        assert max(shares, key=shares.__getitem__) == "key", shares
    line = key(shown, "customer:000001:invoice").evaluate(
        "e => parseFloat(getComputedStyle(e).lineHeight)"
    )
    assert key(shown, "customer:000001:invoice").bounding_box()["height"] < 2 * line


def test_a_tablet_has_a_table_and_not_the_cards_of_a_phone(shown, hold):
    shown.set_viewport_size({"width": 820, "height": 1100})
    hold("stock:1")
    expect(key(shown, "stock:1")).to_be_visible()

    row = shown.get_by_role("row").filter(has=key(shown, "stock:1"))
    assert row.bounding_box()["width"] > 750
    assert row.evaluate("e => getComputedStyle(e).display") == "table-row"


def test_a_phone_shows_six_keys_at_once(shown, hold):
    shown.set_viewport_size({"width": 390, "height": 844})
    for number in range(8):
        hold(f"stock:{number}")
    expect(shown.locator(".key")).to_have_count(8)

    bottoms = [row.bounding_box() for row in shown.locator("tbody tr").all()]
    assert sum(box["y"] + box["height"] <= 844 for box in bottoms) >= 6


def test_a_plain_lock_is_held_by_a_thread_and_not_by_a_task(shown, hold):
    hold("stock:1")
    details = choose(shown, "stock:1")

    expect(shown.get_by_role("row").filter(has=key(shown, "stock:1"))).to_contain_text(
        "thread the-test"
    )
    expect(details.get_by_text("Thread", exact=True)).to_be_visible()
    expect(details.get_by_text("Task", exact=True)).to_be_hidden()


def test_the_last_holders_of_a_key_are_shown_as_far_as_they_were_seen(shown, admin):
    with Lock("stock:seen", store=admin.store):
        details = choose(shown, "stock:seen")
        details.get_by_text("Last holders").click()
        expect(details.get_by_text("has held it for")).to_be_visible()
    expect(details.get_by_text(re.compile(r"^on .*, process \d+, held it for"))).to_be_visible()
    with Lock("stock:seen", store=admin.store):
        expect(details.get_by_text("has held it for")).to_be_visible()

    expect(details.get_by_role("list", name="Last holders").get_by_role("listitem")).to_have_count(
        2
    )
    expect(details.get_by_text("came and went between two readings are missing")).to_be_visible()


def test_a_store_that_is_slow_to_fail_is_reported_before_it_has(tab, start_page, private_server):
    server = private_server()
    page = start_page(DISTLOCK_TEST_STORE=server.url)
    tab.goto(page.url)
    expect(tab.get_by_text("No key is held")).to_be_visible()

    server.pause()
    try:
        began = time.monotonic()
        expect(tab.get_by_role("alert").first).to_contain_text(
            "The lock store has not answered for"
        )
        took = time.monotonic() - began
    finally:
        server.resume()

    assert took < 10  # it is given up after 15 and more
    expect(tab.get_by_role("alert").first).to_be_hidden()


def test_a_page_server_that_hangs_is_reported(shown, page_process):
    expect(shown.get_by_text("No key is held")).to_be_visible()

    page_process.process.send_signal(signal.SIGSTOP)
    try:
        expect(shown.get_by_role("alert").first).to_contain_text(
            re.compile("^No answer for .* s, from the lock store or the page's server")
        )
    finally:
        page_process.process.send_signal(signal.SIGCONT)

    expect(shown.get_by_role("alert").first).to_be_hidden()


ATTACK = """<!doctype html><meta charset=utf-8>
<form method=post enctype=text/plain action="{url}api/release" target=inner>
<input name='{{"name": "mine", "token": "{token}", "x": "' value='"}}'></form>
<iframe name=inner></iframe><iframe src="{url}"></iframe>
<script>
const body = JSON.stringify({{name: "mine", token: "{token}"}});
const post = (headers, mode) => fetch("{url}api/release",
  {{method: "POST", mode, credentials: "include", headers, body}})
  .then(r => r.status, () => "failed");
window.tried = Promise.all([
  post({{"Content-Type": "application/json", "X-Distlock-CSRF": "{csrf}"}}, "cors"),
  post({{"Content-Type": "text/plain"}}, "no-cors"),
  post({{}}, "no-cors"),
  fetch("{url}api/locks", {{credentials: "include"}}).then(r => r.text(), () => "failed"),
  fetch("{url}api/session", {{credentials: "include"}}).then(r => r.text(), () => "failed"),
]);
document.forms[0].submit();
</script>"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "evil.example"])
def test_another_site_changes_and_reads_nothing(tab, start_page, hold, admin, host):
    token = hold("mine")
    page = start_page(DISTLOCK_WEB_TOKEN=TOKEN)
    tab.goto(page.url)
    tab.get_by_label("Token").fill(TOKEN)
    tab.keyboard.press("Enter")
    expect(
        key(tab, "mine")
    ).to_be_visible()  # the browser has a session, which the other site abuses
    csrf = page.get("/api/session")["csrf"]
    answered = []
    tab.goto("about:blank")  # what the page itself asks for does not count
    tab.on("response", lambda response: answered.append((response.url, response.status)))

    with other_site(ATTACK.format(url=page.url, token=token, csrf=csrf)) as port:
        tab.goto(f"http://{host}:{port}/")
        tried = tab.evaluate("window.tried")
        wait_until(
            lambda: tab.wait_for_timeout(50) or any("api/release" in url for url, _ in answered)
        )
        tab.goto("about:blank")

    assert tried[0] == "failed"
    assert tried[3:] == ["failed", "failed"]
    assert not [url for url, status in answered if "api/" in url and status < 400]
    assert admin.show("mine").token == token


def test_a_name_that_was_led_here_shows_nothing(tab, page_process, hold):
    hold("mine")

    answer = tab.goto(f"http://page.example:{page_process.port}/")

    assert answer.status == 421
    assert key(tab, "mine").count() == 0
