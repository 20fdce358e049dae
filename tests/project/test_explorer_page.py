"""The explorer's page at work, in Chromium: mouse, finger and keys, links, a long row, names for those who can't see, a phone."""

import contextlib
import io

import numpy as np
import pytest
from explorer_at_work import ADDRESS, DRAWN, STATE, browser, choose, middle, shown, state

import anymax

pytestmark = [pytest.mark.whole, browser]


@pytest.fixture
def page(opened):
    return opened


def test_dragging_a_bar_with_mouse_finger_and_keys(page):
    assert shown(page, "sparsemax", "above 0") == "2 of 5"
    x, y, (_, top, _, height) = middle(page, '.stick[data-at="3"]')
    page.mouse((x, y), (x, top + height * 0.3), (x, top + height * 0.25))
    x3 = float(state(page)["x"].split(",")[3])
    assert x3 == pytest.approx(2.0, abs=0.05)
    scores = [2, 1.2, 0.4, x3, -1.5]
    assert shown(page, "sparsemax", "τ") == f"{anymax.threshold(anymax.Sparsemax(), scores).tau:.2f}"
    heard = page.js("document.querySelector('.card[data-map=sparsemax] canvas').ariaLabel")
    assert heard.count("exactly 0") == (anymax.sparsemax(scores) == 0).sum() == 3
    page.finger((x, top + height * 0.25), (x, top + height * 0.6), (x, top + height * 0.75))
    assert float(state(page)["x"].split(",")[3]) == pytest.approx(-2.0, abs=0.1)
    before = float(state(page)["x"].split(",")[1])
    page.js("document.querySelector('.stick[data-at=\"1\"]').focus()")
    page.key("ArrowUp", 3)
    assert float(state(page)["x"].split(",")[1]) == pytest.approx(before + 0.3)
    page.key("Delete")
    assert state(page)["x"].split(",")[1] == "-inf"
    assert page.js("document.activeElement.getAttribute('aria-valuetext')").startswith("masked")
    page.key("ArrowRight")
    assert page.js("document.activeElement.dataset.at") == "2"


def test_sliding_a_setting(page):
    assert shown(page, "entmax", "above 0") == "3 of 5"
    page.js("document.getElementById('set-alpha').focus()")
    page.key("ArrowRight", 10)
    assert state(page)["alpha"] == "2"
    p = anymax.sparsemax(np.array([2, 1.2, 0.4, -0.3, -1.5]))
    assert shown(page, "entmax", "above 0") == f"{(p > 0).sum()} of 5"
    assert page.js("document.querySelector('.card[data-map=entmax] canvas').getAttribute('aria-label')").endswith(
        "class 4: exactly 0"
    )
    x, y, (left, _, width, _) = middle(page, "#set-T")
    page.mouse((x, y), (left + width * 0.9, y))
    assert float(state(page)["T"]) > 5
    p = anymax.sparsemax(np.array([2, 1.2, 0.4, -0.3, -1.5]) / float(state(page)["T"]))
    assert shown(page, "sparsemax", "above 0") == f"{(p > 0).sum()} of 5" != "2 of 5"
    page.js("document.getElementById('reset').click()")
    assert (state(page)["T"], state(page)["alpha"]) == ("1", "1.5")


def test_bad_input_is_answered_in_words_and_loses_nothing(page):
    before = state(page)
    page.js("document.getElementById('paste-open').click()")
    page.type("1 2 many")
    page.js("document.querySelector('#paste button[type=submit]').click()")
    words = page.js("document.getElementById('paste-error').textContent")
    assert (
        words
        == 'Entry 3, "many", is not a number; give numbers between spaces or commas, such as 2 1 0.1 -1. Your scores are as they were.'
    )
    assert page.js("document.getElementById('paste-text').value") == "1 2 many"
    assert page.js("document.activeElement.id") == "paste-text"
    assert state(page) == before
    page.js("document.getElementById('paste-text').select()")
    page.type("tensor([3., 1., 2.])")
    page.js("document.querySelector('#paste button[type=submit]').click()")
    assert page.js("document.getElementById('paste-error').textContent") == ""
    assert state(page)["x"] == "3,1,2"
    page.js("document.getElementById('type-T').focus(); document.getElementById('type-T').select()")
    page.type("77")
    page.key("Tab")
    assert page.js("document.getElementById('notice').innerText").startswith(
        "Temperature goes from 0.1 to 10. It stays at 1."
    )
    assert page.js("document.getElementById('type-T').value") == "77"
    assert state(page)["T"] == "1"


def test_a_link_brings_everything_back(page):
    page.js("document.querySelector('#chips label[data-map=perturb] input').click()")
    page.js("document.querySelector('.aim[data-aim=\"2\"]').click()")
    page.js(
        "document.getElementById('set-noise').value = 'laplace'; document.getElementById('set-noise').dispatchEvent(new Event('change'))"
    )
    page.js("document.getElementById('sorted').click()")
    before = state(page)
    assert (before["focus"], before["y"], before["noise"], before["sorted"]) == ("perturb", "2", "laplace", "true")
    cards, address = page.js("document.getElementById('cards').innerText"), page.js("location.href")
    page.open(address)
    assert state(page) == before
    assert page.js("document.getElementById('cards').innerText") == cards
    assert page.js("document.getElementById('notice').hidden")
    page.open(ADDRESS + "#x=3,2,1&T=99")
    assert "T=99: Temperature goes from 0.1 to 10." in page.js("document.getElementById('notice').innerText")
    assert state(page)["x"] == "3,2,1"


def test_the_plane_of_three_classes(page):
    page.open(ADDRESS + "#x=1,0,-1&maps=sparsemax&focus=sparsemax")
    page.js("document.getElementById('simplex').scrollIntoView({block: 'center'})")
    x, y, (left, top, width, _) = middle(page, "#simplex")
    page.mouse((x, y), (left + width / 2, top + width * 0.1))
    scores = [float(v) for v in state(page)["x"].split(",")]
    assert scores == pytest.approx([-0.98, -0.98, 1.96], abs=0.05)
    assert page.js("document.getElementById('simplex').getAttribute('aria-valuetext')").endswith("class 2: 1.00")
    page.key("ArrowDown", 5)
    assert float(state(page)["x"].split(",")[2]) < scores[2] - 0.3


def test_the_program_is_copied(page):
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.js("document.getElementById('copy-python').click()")
    page.wait("document.getElementById('copy-python').textContent === 'Copied'")
    program = page.js("navigator.clipboard.readText()")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(program, scope := {})
    assert shown(page, "sparsemax", "τ") == f"{scope['results']['sparsemax']['tau']:.2f}"
    assert page.js("document.getElementById('python').textContent") == program


def test_it_answers_within_50_ms_on_2000_classes(page):
    """The median over a drag; other work on the machine can only add to it, so that the best of some drags counts."""
    choose(page, "examples", "2,000 classes")
    page.wait("document.querySelector('.surface') !== null")
    left, top, width, height = middle(page, ".surface")[2]
    medians = []
    for _ in range(5):
        page.js("performance.clearMeasures()")
        page.mouse(*((left + width * (0.2 + 0.02 * i), top + height * (0.3 + 0.02 * (i % 5))) for i in range(20)))
        page.js(DRAWN)
        times = page.js("performance.getEntriesByName('anymax-update').map((entry) => entry.duration)")
        assert len(times) >= 5
        medians.append(float(np.median(times)))
        if medians[-1] < 50:
            break
    assert min(medians) < 50
    page.wait(f"({STATE}).x?.split(',').length", lambda scores: scores == 2000)
    drawn = "performance.getEntriesByName('anymax-update').length"
    before = page.js(drawn)
    page.js("new Promise((done) => setTimeout(done, 200))")
    assert page.js(drawn) == before, "it draws on and on"
    assert shown(page, "softmax", "above 0") == "2000 of 2000"


def test_everything_to_operate_has_a_name_and_a_place_in_the_order(page):
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    seen = {}
    for one in tree:
        role = one.get("role", {}).get("value")
        if not one.get("ignored") and role in (
            "slider",
            "button",
            "checkbox",
            "radio",
            "combobox",
            "spinbutton",
            "textbox",
            "image",
            "img",
            "table",
        ):
            seen.setdefault(role, []).append(one.get("name", {}).get("value", "").strip())
    assert all(all(names) for names in seen.values()), seen
    assert len(seen["slider"]) >= 5 + 4 + 1
    assert len(seen["checkbox"]) >= 13
    assert page.js("document.querySelectorAll('[role=alert]').length") == 2
    assert page.js("document.getElementById('live').getAttribute('aria-live')") == "polite"
    page.wait("document.getElementById('live').textContent", lambda text: text.startswith("softmax: 5 of 5 above 0"))
    page.js("document.activeElement.blur()")
    stops = set()
    for _ in range(34):
        page.key("Tab")
        stops.add(
            page.js(
                "document.activeElement.id || document.activeElement.dataset.at || document.activeElement.textContent.trim()"
            )
        )
    tools = {"story-open", "undo", "redo", "share", "copy-python", "theme"}
    assert tools | {"remove", "add", "examples", "0", "4", "set-T", "type-margin"} <= stops
    page.js("document.getElementById('more').open = true; document.querySelector('#more summary').focus()")
    inside = set()
    for _ in range(6):
        page.key("Tab")
        inside.add(page.js("document.activeElement.id"))
    assert inside == {"one-class", "one-score", "target", "names", "sorted", "paste-open"}
    page.js("document.getElementById('skip').focus()")
    page.key("Enter")
    assert page.js("document.activeElement.closest('#chips label').dataset.map") == "softmax"


def contrast(one, other):
    def light(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(
            w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
            for w, c in zip((0.2126, 0.7152, 0.0722), channels)
        )

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_light_and_dark_are_legible_and_nothing_runs_out_of_a_phone(page, tmp_path):
    painted = set()
    for theme in ("light", "dark"):
        if page.js("document.documentElement.dataset.theme") != theme:
            page.js("document.getElementById('theme').click()")
        names = ("paper", "panel", "well", "ink", "soft", "hot", "bad")
        found = {
            name: page.js(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
            for name in names
        }
        found = {name: "#" + "".join(2 * c for c in v[1:]) if len(v) == 4 else v for name, v in found.items()}
        for paper in ("paper", "panel", "well"):
            for words in ("ink", "soft", "hot", "bad"):
                assert contrast(found[words], found[paper]) >= 4.5, (theme, words, paper)
        page.js(DRAWN)
        page.picture(tmp_path / f"{theme}.png")
        painted.add((tmp_path / f"{theme}.png").read_bytes())
    assert len(painted) == 2
    page.size(390, 844, phone=True)
    page.js(DRAWN)
    assert page.js("document.documentElement.scrollWidth") <= 390
    corners = "[...document.querySelectorAll('.card')].map((c) => c.getBoundingClientRect()).map(({ top, right }) => [top, right])"
    cards = page.js(corners)
    assert all(right <= 390 for _, right in cards)  # all cards are seen at once, two in a row
    assert cards[0][0] == cards[1][0] < cards[2][0]
