"""The viewer in a real browser: Debian's chromium, driven over WebDriver."""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from protocol_samples import record
from viewer_samples import CONTENTS, FACT_1, FACT_2, HOSTILE, log, protocol, write_cache

from mapd_verl.data.join import JoinPolicies, join_protocols
from protocol_cache import ProtocolStore
from protocol_cache.reviews import read_reviews
from protocol_cache.store import Candidate

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
REASON = "no browser: install Debian's chromium and chromium-driver (.ci/run does, as root)"
needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=REASON)
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@contextmanager
def viewer(cache: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The real command in a process of its own: its address, and the process."""
    command = [sys.executable, "-m", "protocol_cache", "view", str(cache), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.match(r"(http://127\.0\.0\.1:\d+)/", process.stdout.readline())
        if not found:
            raise AssertionError(process.communicate(timeout=10))
        yield found.group(1), process
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1360,1000"):
        options.add_argument(argument)
    if os.geteuid() == 0:  # chromium's sandbox does not start for root
        options.add_argument("--no-sandbox")
    browser = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        browser.set_page_load_timeout(30)
        yield browser
    finally:
        browser.quit()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "p.sqlite")


def find(driver: Any, selector: str) -> Any:
    from selenium.webdriver.common.by import By

    return driver.find_element(By.CSS_SELECTOR, selector)


def find_all(driver: Any, selector: str) -> list[Any]:
    from selenium.webdriver.common.by import By

    return driver.find_elements(By.CSS_SELECTOR, selector)


@needs_browser
def test_a_person_finds_reads_and_reviews_a_protocol(driver: Any, cache: Path) -> None:
    from selenium.webdriver.support.select import Select

    with viewer(cache) as (address, _):
        driver.get(address)
        assert find(driver, "#total").text == "121" and len(find_all(driver, "table.list tbody tr")) == 50
        find(driver, "a[rel=next]").click()
        assert "page 2 of 3" in find(driver, ".pager").text
        find(driver, "input[name=search]").send_keys("where does CITY")
        Select(find(driver, "select[name=variant]")).select_by_value("succeeded")
        Select(find(driver, "select[name=refused]")).select_by_value("leak")
        find(driver, "button.primary").click()
        assert find(driver, "#total").text == "20"
        find_all(driver, "a.question")[1].click()
        assert find(driver, "h1").text == "Where does city 9 lie?" and "2 of 20" in find(driver, ".pager").text

        # The facts are marked in the passage exactly where they were cut from.
        first, second = (find_all(driver, f"mark[title*='{n}']") for n in (1, 2))
        script = "return [...arguments[0]].map(m => m.firstChild.data).join('')"
        assert [driver.execute_script(script, marks) for marks in (first, second)] == [FACT_1, FACT_2]
        whole = "return [...document.querySelector('#p1 p').childNodes].map(n => (n.firstChild || n).data).join('')"
        assert driver.execute_script(whole) == CONTENTS
        find(driver, "ol.steps a[href='#p1']").click()
        assert driver.current_url.endswith("#p1")
        assert [e.text for e in find_all(driver, ".candidate .badge")] == ["leak", "passed"]

        find(driver, "textarea").send_keys("the city is in another country")
        find(driver, "button.review-bad").click()
        assert find(driver, "#saved").text == "Saved." and find(driver, "#reviewed").text == "reviewed: bad"
        assert find(driver, "textarea").get_attribute("value") == "the city is in another country"
        find(driver, "#after").click()
        assert "3 of 20" in find(driver, ".pager").text, "the filter is still there"
        find(driver, "button.review-withdrawn").click()
        driver.get(address + "/?reviewed=bad")
        assert find(driver, "#total").text == "1" and find(driver, ".review-bad").text == "bad"
    held = read_reviews(cache)
    assert {qid: r.verdict for qid, r in held.items()} == {"q00009": "bad", "q00015": "withdrawn"}
    assert held["q00009"].note == "the city is in another country"
    join = join_protocols(cache, ["q00009", "q00015", "q00021"], policies=JoinPolicies(reviewed_bad="skip"))
    assert [join.action(qid) for qid in join.states] == ["skip", "fallback", "use"]


@needs_browser
def test_hostile_text_does_nothing(driver: Any, cache: Path) -> None:
    with viewer(cache) as (address, _):
        for page in ("/?search=hostile", "/stats"):
            driver.get(address + page)
            assert "pwned" not in driver.title and not find_all(driver, "script, img")
        driver.get(address + "/?search=hostile")
        find(driver, "a.question").click()
        assert find(driver, "h1").text.startswith("Hostile? </textarea></title><script>document.title='pwned'")
        find(driver, "textarea").send_keys(HOSTILE)
        find(driver, "button.review-good").click()
        assert find(driver, "#saved").text == "Saved."
        assert find(driver, "textarea").get_attribute("value") == HOSTILE
        assert "pwned" not in driver.title.split("·")[-1] and driver.title.startswith("Hostile? </textarea>")
        assert not find_all(driver, "script, img, a[href^=javascript]")
        shown = driver.execute_script("return document.querySelector('#p1 p').textContent")
        assert HOSTILE in shown
        # All that was loaded came from this address, and nothing is on the console.
        loaded = driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
        assert loaded and all(name.startswith(address) for name in loaded)
        assert [e for e in driver.get_log("browser") if e["level"] == "SEVERE"] == []


@needs_browser
def test_another_site_cannot_review(driver: Any, cache: Path, tmp_path: Path) -> None:
    with viewer(cache) as (address, _):
        driver.get(address + "/protocol?id=q00000")
        values = {
            name: find(driver, f"input[name={name}]").get_attribute("value") for name in ("id", "digest", "token")
        }
        fields = "".join(f'<input name="{k}" value="{v}">' for k, v in {**values, "verdict": "bad"}.items())
        evil = tmp_path / "evil.html"
        evil.write_text(f'<form method="post" action="{address}/review">{fields}<button>go</button></form>')
        driver.get(evil.as_uri())  # it even knows the token
        find(driver, "button").click()
        assert "sent by another site" in find(driver, "#error").text
    assert read_reviews(cache) == {}


def test_ctrl_c_ends_it_and_a_taken_port_is_named(cache: Path) -> None:
    with viewer(cache) as (address, process):
        with urllib.request.urlopen(address, timeout=10) as page:
            assert page.status == 200
        port = address.rsplit(":", 1)[1]
        second = [sys.executable, "-m", "protocol_cache", "view", str(cache), "--port", port]
        done = subprocess.run(second, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "port already taken" in done.stderr and "Traceback" not in done.stderr
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert process.returncode in (0, 130) and "Traceback" not in said, said


def test_pages_of_25_600_protocols_stay_fast(tmp_path: Path) -> None:
    """Printed: the first load, which filters, and the median of seven. The limits leave room for other work."""
    cache = tmp_path / "large.sqlite"
    with ProtocolStore(cache) as store:
        store._db.execute("PRAGMA synchronous = OFF")
        store._db.execute("PRAGMA journal_mode = MEMORY")
        made, kept = protocol(), log()
        for i in range(25_600):
            r = record(f"q{i:05}", made, question=f"Where does city {i} lie?", created_at=float(i))
            store.put(r, [Candidate(made, True)], kept)
    begin = time.perf_counter()
    with viewer(cache) as (address, _):
        print(f"\nready after {time.perf_counter() - begin:.2f} s")
        pages = {
            "first page": "/",
            "last page": "/?page=512",
            "a search": "/?search=city+2559",
            "filters and an order": "/?task_type=multi_hop&variant=succeeded&sort=newest&page=100",
            "one protocol": "/protocol?id=q12345",
        }
        for name, page in pages.items():
            times = []
            for _ in range(7):
                begin = time.perf_counter()
                with urllib.request.urlopen(address + page, timeout=30) as answer:
                    answer.read()
                times.append((time.perf_counter() - begin) * 1000)
            print(f"{name}: {times[0]:.0f} ms at first, then {statistics.median(times):.0f} ms")
            assert statistics.median(times) < 250 and times[0] < 1500, name
