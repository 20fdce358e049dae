"""The explorer before a class, in Chromium: one screen, names, commas, steps back, the story, paper."""

import base64
import contextlib
import json
import re
import zlib

import pytest
from explorer_at_work import ADDRESS, ALL, DRAWN, RECORD, boxes, browser, click, middle, shown, state, words

import anymax

pytestmark = [pytest.mark.whole, browser]


@pytest.fixture
def page(opened):
    return opened


# -- one screen ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("maps", "sliders"), [("softmax,entmax,sparsemax", 4), (ALL, 10)], ids=["as it opens", "all maps"]
)
def test_sliders_and_bars_are_in_view_together(page, maps, sliders):
    page.size(1280, 720)
    page.open(ADDRESS + f"#maps={maps}")
    found = boxes(page, ".slider input[type=range]")
    assert len(found) == sliders
    seen = [*found, *boxes(page, ".stick"), *boxes(page, ".aim"), *boxes(page, ".card canvas")[:3]]
    assert all(left >= 0 and top >= 0 and right <= 1280 and bottom <= 720 for left, top, right, bottom in seen), seen
    assert page.js("[scrollY, document.querySelector('.hand').scrollTop]") == [0, 0]
    assert min(bottom - top for _, top, _, bottom in boxes(page, ".stick")) > 80


def test_the_bars_of_all_cards_stand_on_one_line(page):
    page.open(ADDRESS + f"#maps={ALL}")
    rows = {}
    for card, canvas in zip(boxes(page, ".card"), boxes(page, ".card canvas")):
        rows.setdefault(card[1], set()).add((canvas[1], canvas[3]))
    assert len(rows) >= 4
    assert all(len(lines) == 1 for lines in rows.values()), rows
    assert page.js("document.querySelectorAll('.card .formula math').length") == 14
    assert page.js("document.querySelectorAll('.card .sign path').length") == 14


@pytest.mark.parametrize("width", [1280, 390])
def test_no_word_is_cut_off(page, width):
    page.size(width, 844, phone=width == 390)
    page.open(
        ADDRESS + "#x=4,-4,3.99&maps=softmax,budget,sparsemax&focus=sparsemax&k=2&names=the%20brown%20fox,dog,cat"
    )
    page.js(RECORD)
    page.js(DRAWN)
    written = page.js("window.written")
    assert {"0.25", "1.00", "the brown fox", "3 of 3"} <= {one["text"] for one in written}
    across = [one for one in written if one["left"] < -0.5 or one["right"] > one["width"] + 0.5]
    assert not across + [one for one in written if one["top"] < 0 or one["bottom"] > one["height"] + 1]
    ((left, top, right, bottom),) = boxes(page, "#board")
    aims, figures = boxes(page, ".aim"), boxes(page, ".stick .figure")
    assert len(figures) == 3
    for box in figures:
        assert left <= box[0] < box[2] <= right, box
        assert top <= box[1] < box[3] <= min(aim[1] for aim in aims) + 1, box
    for aim in aims:
        assert aim[3] <= bottom


# -- names, commas, entropies ----------------------------------------------------------------------------------------


def test_classes_have_names(page):
    page.js("document.getElementById('more').open = true; document.getElementById('names').focus()")
    page.type("cat, <b>dog</b>,fox")
    page.key("Tab")
    assert state(page)["names"] == "cat,<b>dog</b>,fox"
    assert page.js("[...document.querySelectorAll('.aim')].map((e) => e.textContent)") == [
        "cat", "<b>dog</b>", "fox", "3", "4",
    ]  # fmt: skip
    assert page.js("document.querySelector('.stick').ariaLabel") == "Score of cat"
    assert "cat: 0.90, <b>dog</b>: 0.10, fox: exactly 0, class 3: exactly 0" in page.js(
        "document.querySelector('.card[data-map=sparsemax] canvas').ariaLabel"
    )
    heads = page.js("[...document.querySelectorAll('#jacobian th')].map((e) => e.textContent)")
    assert heads == ["class", "cat", "<b>dog</b>", "fox", "x3", "x4", "cat", "<b>dog</b>", "fox", "p3", "p4"]
    assert words(page, "gradient-words").startswith("of cat is 0.10")
    page.js(RECORD)
    page.js(DRAWN)
    assert {"◎ cat", "fox"} <= {one["text"] for one in page.js("window.written")}
    assert 'names = ["cat", "<b>dog</b>", "fox", "class 3", "class 4"]' in words(page, "python")
    address = page.js("location.href")
    page.open(address)
    assert page.js("document.querySelector('.aim').textContent") == "cat"
    page.js("document.getElementById('more').open = true; document.getElementById('names').select()")
    page.type("a,b,c,d,e,f")
    page.key("Tab")
    assert page.js("document.getElementById('notice').innerText").startswith("These are 6 names for 5 classes.")
    assert state(page)["names"] == "cat,<b>dog</b>,fox"


def test_a_pasted_comma_is_asked_about(page):
    before = state(page)["x"]
    page.js(
        "{ const given = new DataTransfer(); given.setData('text', '1,5 2,5');"
        " document.body.dispatchEvent(new ClipboardEvent('paste', { clipboardData: given, bubbles: true })); }"
    )
    assert state(page)["x"] == before
    assert boxes(page, "#comma")
    ways = page.js("[...document.querySelectorAll('#comma-ways button')].map((e) => [e.dataset.way, e.textContent])")
    assert ways == [
        ["decimal", "It marks decimals 2 scores: 1.5 | 2.5"],
        ["separator", "It stands between numbers 4 scores: 1 | 5 | 2 | 5"],
    ]
    assert page.js("document.activeElement.dataset.way") == "decimal"
    page.key("Tab")
    page.js("document.activeElement.click()")
    assert state(page)["x"] == "1,5,2,5"
    assert not boxes(page, "#comma")
    page.js("document.querySelector('#paste button[type=submit]').click()")
    page.js("document.querySelector('#comma-ways button').click()")
    assert state(page)["x"] == "1.5,2.5"


def test_entropies_are_those_of_probabilities(page):
    page.open(ADDRESS + "#x=-1,-2,-0.5&maps=softmax,budget,relu&focus=budget&k=2&heat=entropy")
    for fact in ("Shannon", "Rényi 2", "Tsallis 1.5"):
        assert shown(page, "softmax", fact).replace(".", "").isdigit()
        for name, total in (("budget", "2.00"), ("relu", "0")):
            why = f"no entropy: these numbers sum to {total}, and an entropy is one of probabilities, which sum to 1"
            assert shown(page, name, fact) == f"–{why}"
    card = "[...document.querySelectorAll('.card[data-map=budget] dl div')].at(-1)"
    assert page.js(f"{card}.title").startswith("no entropy: these numbers sum to 2.00")
    assert page.js("document.getElementById('heat').value") == "top"
    assert page.js("document.querySelector('#heat option[value=entropy]').disabled")
    page.open(ADDRESS + "#x=-1,-2,-0.5&maps=budget&k=1")
    assert (
        shown(page, "budget", "Shannon") == f"{anymax.entropy(anymax.apply(anymax.Budget(1), [-1.0, -2.0, -0.5])):.2f}"
    )


# -- steps back ------------------------------------------------------------------------------------------------------


def test_undo_and_redo(page):
    begun = state(page)
    assert [page.js(f"document.getElementById('{name}').ariaDisabled") for name in ("undo", "redo")] == ["true", "true"]
    x, y, (_, top, _, height) = middle(page, '.stick[data-at="3"]')
    page.mouse((x, y), (x, top + height * 0.3), (x, top + height * 0.2), (x, top + height * 0.1))
    dragged = state(page)
    x, y, (left, _, width, _) = middle(page, "#set-alpha")
    page.mouse((x, y), (left + width * 0.7, y), (left + width * 0.8, y))
    slid = state(page)
    page.js("document.querySelector('.aim[data-aim=\"2\"]').click()")
    named = state(page)
    assert len({json.dumps(one) for one in (begun, dragged, slid, named)}) == 4
    page.key("z", held=2)
    assert state(page) == slid
    click(page, "undo")
    assert state(page) == dragged
    page.key("z", held=4)
    assert state(page) == begun
    page.key("z", held=2)
    assert state(page) == begun
    page.key("z", held=10)
    assert state(page) == dragged
    click(page, "redo")
    click(page, "redo")
    assert state(page) == named
    page.js("document.getElementById('type-T').focus()")
    page.key("z", held=2)
    assert state(page) == named  # a field has its own


# -- the story -------------------------------------------------------------------------------------------------------


def test_the_story(page):
    page.size(1280, 720)
    page.js("document.querySelector('.aim[data-aim=\"1\"]').click()")
    own = state(page)
    page.js("document.getElementById('story-open').focus()")
    page.key("Enter")
    titles = []
    for step in range(1, 6):
        assert state(page)["story"] == str(step)
        assert words(page, "story-count") == f"Step {step} of 5"
        assert {**state(page), "story": None} == {**own, "story": None}  # one's own state stays in the address
        assert page.js("document.activeElement.id") == "story-title"
        assert all(box[3] <= 720 for box in boxes(page, "#story, .card canvas, figure canvas, figure table")), step
        titles.append(words(page, "story-title"))
        if step == 3:
            alpha = "Number(document.getElementById('type-alpha').value)"
            page.wait(f"{alpha} > 1.05")  # it moves by itself
            click(page, "story-play")
            page.js(DRAWN)  # what was moved before the click is painted in the next frame
            held = page.js(alpha)
            assert held < 2
            page.js("new Promise((done) => setTimeout(done, 200))")
            assert page.js(alpha) == held
            assert words(page, "story-play") == "Play"
            along = "document.getElementById('story-along')"
            page.js(f"{along}.value = 1000; {along}.dispatchEvent(new Event('input'))")
            page.js(DRAWN)
            assert page.js(alpha) == 2
            assert words(page, "story-now") == "α = 2.00: 2 of 4 animals above 0"
        if step == 5:
            page.js("document.getElementById('story-back').focus()")
            page.key("Enter")
            assert words(page, "story-count") == "Step 4 of 5"
            page.js("document.getElementById('story-next').click()")
        page.js("document.getElementById('story-next').focus()")
        page.key("Enter")
    assert len(set(titles)) == 5
    assert state(page) == own
    assert not boxes(page, "#story")
    assert page.js("document.activeElement.id") == "story-open"
    click(page, "undo")
    assert state(page)["y"] == "0"  # its steps back too
    page.size(390, 844, phone=True)
    page.open(ADDRESS + "#story=3")
    page.js(DRAWN)
    ((left, _, right, _),) = boxes(page, ".card.chosen")
    assert 0 <= left < right <= 390
    page.open(ADDRESS + "#x=1,0,-1&story=5")
    assert words(page, "story-title") == "The Jacobian"
    page.js("document.getElementById('story-title').focus()")
    page.key("Escape")
    assert (state(page)["x"], state(page).get("story")) == ("1,0,-1", None)


def test_the_story_stands_still_for_those_who_want_less_motion(page):
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    page.open(ADDRESS + "#story=3")
    along = "Number(document.getElementById('story-along').value)"
    page.js("new Promise((done) => setTimeout(done, 400))")
    assert (page.js(along), words(page, "story-play")) == (0, "Play")
    click(page, "story-play")
    seen = {page.wait(along, lambda at, last=last: at != last) for last in (0, 250)}
    assert seen == {250, 500}  # a picture at a time
    click(page, "story-play")
    assert words(page, "story-play") == "Play"


# -- paper -----------------------------------------------------------------------------------------------------------


def test_paper_keeps_the_bars_and_holds_everything(page):
    page.open(ADDRESS + f"#maps={ALL}")
    if page.js("document.documentElement.dataset.theme") != "dark":
        click(page, "theme")
    seen = "[document.documentElement.dataset.theme, document.querySelector('.card canvas').width]"
    page.js(f"addEventListener('beforeprint', () => (window.printed = {seen}))")
    wide = page.js("document.querySelector('.card canvas').width")
    pdf = base64.b64decode(page.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 7
    painted = b"".join(unpacked(part) for part in re.findall(rb"stream\r?\n(.*?)endstream", pdf, flags=re.S))
    well = rb"\.949\d* \.933\d* \.898\d* rg"  # what the bars stand on, #f2eee5
    assert re.search(well, painted)
    assert page.js("window.printed[0]") == "light"
    assert page.js("window.printed[1]") >= 2.9 * wide
    assert page.js("document.documentElement.dataset.theme") == "dark"
    assert page.js("document.querySelector('.card canvas').width") == wide
    page.size(700, 1000)
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.js("document.documentElement.scrollWidth") <= 700
    assert all(right <= 700 for _, _, right, _ in boxes(page, ".card, canvas, pre, table, math"))
    assert not boxes(page, ".tools, .chips, input[type=range]")
    assert len(boxes(page, ".stick .bar")) == 5


def unpacked(part):
    with contextlib.suppress(zlib.error):
        return zlib.decompress(part)
    return b""
