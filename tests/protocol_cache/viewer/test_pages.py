"""The pages over HTTP: filters, escaping, and who may post."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from protocol_samples import record
from viewer_samples import FACT_1, HOSTILE, protocol, write_cache

from mapd_verl.errors import UserError
from protocol_cache import ProtocolStore
from protocol_cache.reviews import read_reviews
from protocol_cache.store import Candidate
from protocol_cache.viewer.app import BODY_LIMIT, make_app
from protocol_cache.viewer.catalogue import Catalogue, Filter

BASE = "http://127.0.0.1:8123"


class Browser:
    """Requests to the application in this process; one event loop, as in a server."""

    def __init__(self, cache: Path, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        transport = httpx.ASGITransport(make_app(cache, **options))
        self.client = httpx.AsyncClient(transport=transport, base_url=BASE)

    def get(self, address: str, **options: Any) -> httpx.Response:
        return self.loop.run_until_complete(self.client.get(address, **options))

    def post(self, address: str, **options: Any) -> httpx.Response:
        return self.loop.run_until_complete(self.client.post(address, **options))

    def form(self, qid: str) -> dict[str, str]:
        """The hidden fields of a protocol's review form."""
        text = self.get("/protocol", params={"id": qid}).text
        found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', text)
        return {name: html.unescape(value) for name, value in found}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "p.sqlite")


@pytest.fixture
def browser(cache: Path) -> Iterator[Browser]:
    made = Browser(cache)
    yield made
    made.loop.run_until_complete(made.client.aclose())
    made.loop.close()


def total(response: httpx.Response) -> int:
    found = re.search(r'id="total">([\d,]+)<', response.text)
    assert response.status_code == 200 and found
    return int(found.group(1))


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({}, 121),
        ({"status": "passed"}, 81),
        ({"status": "rejected"}, 40),
        ({"variant": "evidence"}, 40),
        ({"variant": "succeeded", "task_type": "multi_hop"}, 41),
        ({"refused": "leak", "status": "passed"}, 41),
        ({"search": "CITY 7 lie"}, 1),
        ({"search": "its currency"}, 41),
        ({"search": HOSTILE}, 1),
        ({"search": "%"}, 0),
        ({"reviewed": "bad"}, 0),
        ({"colour": "red", "sort": "backwards"}, 121),
    ],
)
def test_filters(browser: Browser, query: dict[str, str], count: int) -> None:
    assert total(browser.get("/", params=query)) == count


def test_pages_cover_everything_once_in_order(browser: Browser) -> None:
    seen: list[str] = []
    for page in (1, 2, 3):
        seen += re.findall(r"Where does city (\d+) lie", browser.get("/", params={"page": page, "sort": "newest"}).text)
    assert seen == sorted((str(i) for i in range(120)), key=int, reverse=True)
    assert browser.get("/?page=9999").text.count("page 3 of 3") == 1
    assert total(browser.get("/?page=-1")) == total(browser.get("/?page=x")) == 121


def test_a_facet_counts_what_its_other_values_would_give(cache: Path) -> None:
    catalogue = Catalogue(cache)
    catalogue.refresh()
    facets = catalogue.listing(Filter(status="passed", variant="evidence"), 1).facets
    assert facets["status"] == {"passed": 40} and facets["variant"] == {"evidence": 40, "succeeded": 41}
    for value, count in facets["variant"].items():
        assert catalogue.listing(Filter(status="passed", variant=value), 1).total == count
    catalogue.close()


def test_one_protocol_with_all_its_parts(browser: Browser) -> None:
    page = browser.get("/protocol", params={"id": "q00003"}).text
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for part in ("Where does city 3 lie?", FACT_1, "country of X", "plan step 1 names the answer", "Task: multi_hop"):
        assert part in text
    assert re.findall(r'href="#p(\d)"', page) and 'id="p1"' in page
    assert "fact 1, 2" in page and "this passage was not retrieved" in page
    assert browser.get("/protocol", params={"id": "q00003", "template": "default"}).status_code == 200
    assert browser.get("/protocol", params={"id": "q00003", "template": "/etc/passwd.j2"}).status_code == 404
    assert browser.get("/protocol", params={"id": "nobody"}).status_code == 404
    rejected = browser.get("/protocol", params={"id": "q00002"}).text
    assert "No protocol" in rejected and "<form" not in rejected
    stats = browser.get("/stats").text
    assert "66.9%" in stats and 'href="/?refused=leak"' in stats and "openai/m" in stats


def test_previous_and_next_stay_inside_the_filter(browser: Browser) -> None:
    page = browser.get("/protocol", params={"id": "q00004", "variant": "evidence"}).text
    assert "2 of 40" in page
    neighbours = re.findall(r'id="(before|after)" href="([^"]+)"', page)
    ids = [re.search(r"id=(q\d+)", address).group(1) for _, address in neighbours]  # type: ignore[union-attr]
    assert ids == ["q00001", "q00007"] and all("variant=evidence" in address for _, address in neighbours)


TAGS = {
    *("html", "head", "meta", "title", "link", "body", "header", "nav", "main", "section", "article", "aside", "div"),
    *(
        "h1",
        "h2",
        "p",
        "a",
        "b",
        "q",
        "span",
        "code",
        "pre",
        "strong",
        "mark",
        "sup",
        "ol",
        "ul",
        "li",
        "dl",
        "dt",
        "dd",
    ),
    *("table", "thead", "tbody", "tr", "th", "td", "meter", "details", "summary"),
    *("form", "label", "input", "select", "option", "textarea", "button"),
}


@pytest.mark.parametrize("address", ["/", "/stats", "/?search=" + HOSTILE.replace("&", "%26"), "protocol", "missing"])
def test_what_a_teacher_wrote_is_never_markup(browser: Browser, address: str) -> None:
    if address == "protocol":
        response = browser.get("/protocol", params={"id": f"hostile{HOSTILE}"})
    elif address == "missing":
        response = browser.get("/protocol", params={"id": f"gone{HOSTILE}"})
    else:
        response = browser.get(address)
    page = response.text
    assert "<script" not in page and "<img" not in page and 'href="javascript' not in page
    assert "alert" not in page or "{{ 7*7 }}" in page  # no template of a template
    assert set(re.findall(r"</?([a-zA-Z][^\s>]*)", page)) <= TAGS
    assert page.count("</title>") == 1 and page.count("</textarea>") <= 1
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src" not in policy and "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"


def test_nothing_comes_from_elsewhere(browser: Browser) -> None:
    for address in ("/", "/stats", "/protocol?id=q00000"):
        page = browser.get(address).text
        assert re.findall(r'(?:src|href|action)="(?!/|#)([^"]*)"', page) == []
    assert "url(" not in browser.get("/style.css").text and "@import" not in browser.get("/style.css").text


def test_a_review_is_kept_shown_changed_and_cleared(browser: Browser, cache: Path) -> None:
    note = f"wrong city\r\n{HOSTILE}"
    form = browser.form("q00000")
    done = browser.post("/review", data={**form, "verdict": "bad", "note": note})
    assert done.status_code == 303
    page = browser.get(done.headers["location"]).text
    assert "Saved." in page and "reviewed: bad" in page and "<script" not in page
    review = read_reviews(cache)["q00000"]
    assert review.verdict == "bad" and review.note == f"wrong city\n{HOSTILE}"
    assert total(browser.get("/?reviewed=bad")) == 1
    browser.post("/review", data={**form, "verdict": "withdrawn", "note": ""})
    assert read_reviews(cache)["q00000"].verdict == "withdrawn"
    assert browser.post("/review", data={**form, "verdict": "clear"}).status_code == 303
    assert read_reviews(cache) == {} and total(browser.get("/?reviewed=bad")) == 0
    stranger = browser.form(f"hostile{HOSTILE}")
    assert browser.post("/review", data={**stranger, "verdict": "good", "note": ""}).status_code == 303
    assert set(read_reviews(cache)) == {f"hostile{HOSTILE}"}


def test_only_the_viewers_own_form_may_post(browser: Browser, cache: Path) -> None:
    form = {**browser.form("q00000"), "verdict": "bad", "note": ""}
    refused = [
        browser.post("/review", data={k: v for k, v in form.items() if k != "token"}),
        browser.post("/review", data={**form, "token": "é" + form["token"]}),
        browser.post("/review", data=form, headers={"Origin": "http://evil.example"}),
        browser.post("/review", data=form, headers={"Origin": "null"}),
        browser.post("/review", data=form, headers={"Origin": "http://127.0.0.1:9999"}),
        browser.post("/review", data=form, headers={"Sec-Fetch-Site": "cross-site"}),
        browser.post("/review", json=form),
    ]
    assert [r.status_code for r in refused] == [403] * 7
    assert browser.post("/review", data=form, headers={"Host": "evil.example:8123"}).status_code == 421
    assert browser.get("/", headers={"Host": "evil.example"}).status_code == 421
    assert browser.post("/review", content=b"x" * (BODY_LIMIT + 1)).status_code == 413
    assert browser.post("/review", content=b"\xff").status_code == 400
    assert browser.get("/review").status_code == 405
    assert browser.post("/review", data={**form, "verdict": "superb"}).status_code == 400
    assert browser.post("/review", data={**form, "id": "nobody"}).status_code == 404
    assert browser.post("/review", data={**form, "note": "x" * 4001}).status_code == 409
    assert read_reviews(cache) == {}
    same = {"Origin": BASE, "Sec-Fetch-Site": "same-origin"}
    assert browser.post("/review", data=form, headers=same).status_code == 303


def test_a_protocol_made_anew_is_not_reviewed_by_an_old_page(browser: Browser, cache: Path) -> None:
    form = browser.form("q00000")
    with ProtocolStore(cache) as store:
        store.put(record("q00000", protocol("!")))
    answer = browser.post("/review", data={**form, "verdict": "good", "note": ""})
    assert answer.status_code == 409 and "made anew" in answer.text
    assert read_reviews(cache) == {}


def test_a_read_only_viewer_takes_no_review(cache: Path) -> None:
    browser = Browser(cache, readonly=True)
    assert "<form" not in browser.get("/protocol?id=q00000").text
    assert browser.post("/review", data={"id": "q00000"}).status_code == 403


def test_a_protocol_of_another_kind_is_shown_as_it_is(cache: Path) -> None:
    """Caches of the ablations hold no plan and no facts."""
    with ProtocolStore(cache) as store:
        made = {"variant": "raw", "task_type": "multi_hop", "trajectory": ["Searched <b>X</b>."], "answer": "Z"}
        store.put(record("raw", made))
    page = Browser(cache).get("/protocol?id=raw").text
    assert "Searched &lt;b&gt;X&lt;/b&gt;." in page and "<h2>Plan</h2>" not in page


def test_another_processs_records_appear(cache: Path) -> None:
    """What was added, written again and taken out: the catalogue is then what a new one reads."""
    catalogue = Catalogue(cache)
    catalogue.refresh()

    def up_to_date() -> bool:
        catalogue.refresh()
        fresh = Catalogue(cache)
        fresh.refresh()
        wanted = [Filter(), Filter(status="rejected"), Filter(refused="leak")]
        same = all(catalogue.listing(w, 1) == fresh.listing(w, 1) for w in wanted)
        fresh.close()
        return same

    refused = Candidate({}, False, "leak", "leak: plan step 1")
    with ProtocolStore(cache) as store:
        store.put(record("q00000", question="Changed?"), [refused])
        store.put(record("a", protocol()))
        catalogue.refresh(least_s=60.0)
        assert len(catalogue) == 121, "not looked again yet"
        assert up_to_date() and len(catalogue) == 122
        changed = catalogue.get("q00000")
        assert changed is not None and changed.question == "Changed?" and changed.refused == ("leak",)
        store.put(record("a", question="The last one again?", created_at=2000.0))
        assert up_to_date()
        store._db.execute("PRAGMA foreign_keys = ON")
        store._db.execute("DELETE FROM records WHERE question_id IN ('q00001', 'q00002')")
        assert up_to_date() and len(catalogue) == 120
        store._db.execute("DELETE FROM records WHERE question_id = 'q00003'")
        store.put(record("b", protocol()))
        assert up_to_date() and len(catalogue) == 120
    catalogue.close()


def test_no_cache_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.sqlite: no such file"):
        make_app(tmp_path / "none.sqlite")
