"""The pages in a real Chromium, for a run whose texts all attack them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Route
from watched import Watched

pytestmark = pytest.mark.slow

PAGES = (
    "page=overview",
    "page=compare",
    "page=samples",
    "page=samples&sample=6.1",  # 1 MB on one line
    "page=samples&sample=6.3&view=diff",
    "page=samples&sample=6.3",  # tool calls
    "page=samples&sample=6.4",  # a sample that is its own parent
    *(f"page=samples&sample=6.3&color={color}" for color in ("difference", "gated")),
    "page=samples&sample=6.1&color=logprob",  # an untrained sample, with tokens of 35,000 characters
    "page=samples&sample=6.2&color=gated",  # no marks were logged for this sample
    "page=samples&sample=6.3&color=__proto__",
    "page=samples&sample=6.5",  # a chat
    "page=samples&sample=6.5&raw=1",
    "page=problems",
    "page=curves&smooth=0.6&with=1",
    "page=curves&x=hours&log=1&with=1",
    "page=pipeline",
    "page=warnings",
    "page=nowhere&run=99&sample=x.y&agent=%3Cscript%3E",
)


@pytest.fixture
def watched(browser: Browser, viewer: str) -> Iterator[Watched]:
    seen = Watched(browser, viewer.partition("?")[0])
    seen.page.goto(viewer)
    seen.page.wait_for_selector("a.here >> text=overview")  # the first page
    seen.open("?page=samples")
    indexed = "document.querySelector('.state')?.innerText.match(/samples$/) && document.querySelector('.item')"
    seen.wait_until(indexed)
    yield seen
    seen.page.close()


def test_pages_of_a_hostile_run_stay_whole_and_unattacked(watched: Watched) -> None:
    for scheme, width in (("light", 1280), ("dark", 390)):
        watched.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        watched.page.set_viewport_size({"width": width, "height": 844})
        for query in PAGES:
            watched.open(f"?{query}")
            too_wide = watched.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert too_wide <= 0, f"{query} is {too_wide} pixels wider than {width}"
            assert "PWNED" not in watched.page.title()
            words = watched.page.locator("main").inner_text()
            assert not re.search(r"\b(?:None|null|NaN|undefined)\b|Loading", words), query
    assert not watched.complaints
    assert not [address for address in watched.asked if not address.startswith(watched.origin)]
    assert watched.is_refused_what_is_elsewhere()  # a request to another host would have been noticed


def test_texts_are_shown_whole_and_hidden_characters_named(watched: Watched) -> None:
    watched.open("?page=samples&sample=6.3")
    watched.page.wait_for_selector("details.tool")
    assert watched.page.locator("details.tool").count() == 2
    text = watched.page.locator(".side").inner_text()
    assert "<script>document.title" in text and not set(text) & set("\x00\x1b\u202e\u2067\x9b")
    text = watched.page.locator(".side").text_content() or ""
    assert "⟨U+202E⟩" in text and "{{7*191}}" in text
    assert watched.page.locator(".segments rect").count() == 3
    watched.open("?page=samples&sample=6.1")
    watched.page.wait_for_selector("text=policy version 0")
    assert watched.page.locator(".segments").count() == 0  # the sample is from a single version
    watched.open("?page=samples&sample=6.3")
    watched.page.get_by_text("what it changed").click()
    watched.page.wait_for_selector("text=too long to be compared")


def test_tokens_are_coloured_by_what_was_kept_of_them(watched: Watched) -> None:
    page = watched.page
    watched.open("?page=samples&sample=6.3")
    page.keyboard.press("c")
    page.wait_for_selector(".tokens.by-logprob")
    assert "color=logprob" in page.url  # a link shows what its sender saw
    tokens = page.locator(".tokens [data-i]")
    assert tokens.count() == 120 and page.locator(".tokens details.tool").count() == 2
    levels = [tokens.nth(i).get_attribute("class") for i in (0, 1, 2, 7, 24, 47, 70, 115)]  # -k / 10 nats
    assert levels == ["tok l0", "tok l0", "tok l1", "tok l2", "tok l3", "tok l4", "tok l5", "tok given"]
    backgrounds = [tokens.nth(i).evaluate("e => getComputedStyle(e).backgroundColor") for i in (0, 7, 70)]
    assert len(set(backgrounds)) == 3
    assert page.locator(".tokens .cut").all_inner_texts()[0] == "v4"
    assert page.locator(".tokens .cut").evaluate_all("all => all.map(e => e.textContent)") == ["v4", "v5", "v6"]
    text = page.locator(".tokens").evaluate("e => [...e.querySelectorAll('[data-i]')].map(t => t.textContent).join('')")
    assert "<script>document.title" in text and "⟨U+202E⟩" in text and "\u202e" not in text and "\x1b" not in text
    # Marks are on every fourth of 110 tokens.
    for color, marks in {"entropy": 0, "difference": 0, "clipped": 28, "gated": 27}.items():
        page.select_option("select[aria-label='colour tokens by']", color)
        page.wait_for_selector(f".tokens.by-{color}")
        assert page.locator(".tokens .marked").count() == marks and f"color={color}" in page.url
    assert page.locator(".tokens .corrected").count() == 27
    assert "masked by the gate: 27 of 120 tokens" in page.locator(".legend").inner_text()
    page.select_option("select[aria-label='colour tokens by']", "")
    page.wait_for_selector(".tokens", state="detached")
    assert "color" not in page.url and not watched.complaints


def test_a_sample_without_tokens_names_the_setting_and_others(watched: Watched) -> None:
    page = watched.page
    watched.open("?page=samples&sample=1.1&color=entropy")  # step 0 is nearer, but its file is damaged
    page.wait_for_selector("text=run.token_log_every")
    page.get_by_role("button", name="corrector1 3").click()
    page.wait_for_selector(".tokens.by-entropy")
    assert "sample=6.3" in page.url
    watched.open("?page=samples&run=1&sample=1.1&color=entropy")
    page.wait_for_selector("text=run.token_log_every")
    assert page.locator(".note button").count() == 0 and not watched.complaints


def test_keys_filters_and_links_lead_to_the_samples(watched: Watched) -> None:
    page = watched.page
    watched.open("?page=samples&run=1")
    page.wait_for_selector(".item.here")  # the page opens on the newest sample
    first = page.url
    page.keyboard.press("j")
    watched.wait_until(f"location.href !== {first!r}")
    page.keyboard.press("k")
    watched.wait_until(f"location.href === {first!r}")
    page.select_option("select[aria-label=agent]", "verifier1")
    items = "[...document.querySelectorAll('.item b')]"
    watched.wait_until(f"{items}.length > 0 && {items}.every(b => b.innerText === 'verifier1')")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("no")
    page.evaluate("dispatchEvent(new Event('state'))")  # the page is rendered while the user types
    page.wait_for_timeout(100)
    page.keyboard.type("where")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=No sample passes this filter")
    shared = page.url
    assert "agent=verifier1" in shared and "words=nowhere" in shared
    watched.open(shared.removeprefix(watched.origin))  # a link shows what its sender saw
    page.wait_for_selector("text=No sample passes this filter")
    page.get_by_text("clear").click()
    page.wait_for_selector(".item")
    page.locator(".item").first.click()
    page.wait_for_selector(".chip.here")
    above = page.locator(".detail h2").inner_text()
    page.keyboard.press("u")
    watched.wait_until(f"document.querySelector('.detail h2').innerText !== {above!r}")
    assert not watched.complaints


def test_each_page_says_that_it_loads(watched: Watched) -> None:
    page, held = watched.page, list[Route]()

    def hold(route: Route) -> None:
        held.append(route)

    for name, question in {
        "overview": "overview",
        "samples": "samples",
        "problems": "problems",
        "curves": "charts",
        "pipeline": "spans",
        "warnings": "warnings",
        "compare": "compare",
    }.items():
        page.route(f"**/api/{question}?*", hold)
        page.goto(f"{watched.origin}?page={name}")
        page.wait_for_selector("main [role=status] >> text=Loading")
        while held:
            held.pop().continue_()
        page.unroute(f"**/api/{question}?*")
        page.wait_for_selector("main [role=status]", state="detached")
    assert not watched.complaints


def test_a_chat_is_shown_as_messages_with_markdown_and_latex(watched: Watched) -> None:
    page = watched.page
    watched.open("?page=samples&sample=6.5")
    page.wait_for_selector(".message")
    assert page.locator(".message summary b").all_inner_texts() == ["system", "user"]
    closed = page.locator(".message:not([open])")
    assert closed.count() == 1 and "1,099 characters" in closed.inner_text()
    problem = page.locator(".message.user .markdown")
    assert problem.inner_text().strip() == "Two & lines\nof a problem: 3*4*5, $12 an hour and $5 more."
    assert problem.locator("em").inner_text() == "problem" and problem.locator("math").count() == 0
    wrote = page.locator(".side > div:last-child > .markdown")
    assert wrote.locator("strong").inner_text() == "First" and wrote.locator("td math msqrt").count() == 1
    assert wrote.locator("math").count() == 4 and wrote.locator(".display math mtr").count() == 2
    assert wrote.locator("pre.code").inner_text() == 'python\nx = "$y$"  # *no* Markdown\nz = 1\n'
    assert (
        wrote.locator("mrow").last.evaluate("e => getComputedStyle(e.closest('[style*=border]')).borderStyle")
        == "solid"
    )
    text = wrote.inner_text()
    for shown in (
        "$\\frac{1$",
        "http://example.invalid/a its title",
        "an image http://example.invalid/b",
        "<b>no HTML</b>",
    ):
        assert shown in text, shown
    for shown in ("&#x202e;", '$\\char"202E$', "[gone]: http://example.invalid/c", "#### 72"):
        assert shown in text, shown
    assert page.locator(".side").locator("a, img, [id], [href], [src]").count() == 0 and "\u202e" not in text
    page.keyboard.press("r")
    page.wait_for_selector(".side pre >> text=<|im_start|>system")
    assert "raw=1" in page.url and page.locator(".markdown").count() == 0
    page.get_by_label("raw text").uncheck()
    page.wait_for_selector(".message.user .markdown")
    assert "raw" not in page.url and not watched.complaints


def test_samples_stand_below_their_problem_and_step(watched: Watched) -> None:
    page = watched.page
    watched.open("?page=samples&run=1&last=1")
    page.wait_for_selector(".group")
    heads = [" ".join(text.split()) for text in page.locator(".group").all_inner_texts()]
    assert heads[0] == "p0.2 step 1 verifier1 4 × 0.5" and len(heads) == 9
    page.locator(".group a").first.click()
    watched.wait_until("document.querySelectorAll('.group').length === 2")
    watched.open("?page=samples")
    page.get_by_role("button", name="no answer found").click()
    watched.wait_until("document.querySelector('.count').innerText.startsWith('4 samples')")
    assert "flag=no+answer+found" in page.url and not watched.complaints


def test_a_problems_cell_leads_to_its_samples(watched: Watched) -> None:
    page = watched.page
    watched.open("?page=problems&run=1")
    page.wait_for_selector("table.heat")
    assert page.locator("table.heat tr").first.inner_text().split() == [
        "problem",
        "samples",
        "all",
        "steps",
        "0",
        "1",
        "2",
    ]
    assert page.locator("table.heat tr").count() == 10 and page.locator("table.heat .cell").count() == 9
    page.select_option("select[aria-label=order]", "hardest")
    means = [float(row.split("\t")[2]) for row in page.locator("table.heat tr").all_inner_texts()[1:]]
    assert means == sorted(means) and means[0] < means[-1]
    page.select_option("select[aria-label=measure]", "right")
    page.select_option("select[aria-label=agent]", "verifier1")
    watched.wait_until("document.querySelectorAll('table.heat tr').length === 7")
    page.locator("table.heat .cell a").first.click()
    page.wait_for_selector(".item.here")
    assert page.locator(".group").count() == 1 and page.locator(".item").count() == 4
    assert page.locator(".item b").all_inner_texts() == ["verifier1"] * 4 and not watched.complaints


def test_curves_stand_over_steps_tokens_or_hours_on_two_scales(watched: Watched) -> None:
    page = watched.page
    watched.open("?page=curves&run=1")
    page.wait_for_selector("[aria-label='Response length, tokens, over step'] canvas")
    page.select_option("select[aria-label='x axis']", "tokens")
    page.wait_for_selector("[aria-label='Response length, tokens, over tokens trained on'] canvas")
    page.get_by_label("log scale").check()
    page.wait_for_selector("text=values that are not above 0 are left out")  # rewards of 0
    assert "x=tokens" in page.url and "log=1" in page.url
    page.select_option("select[aria-label='x axis']", "hours")
    page.wait_for_selector("[aria-label='Entropy, nats, over hours, without evaluations'] canvas")
    assert not watched.complaints
