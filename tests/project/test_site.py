"""The site of the documentation: its pictures for both themes, its first figures of speed, its addresses, its search."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest

import anymax

DOCS = Path(__file__).parents[2] / "docs"
if not DOCS.is_dir():
    pytest.skip("the pages are in the repository only", allow_module_level=True)

from generator import maps, measured, pictures, project, scores, search, speed

pytestmark = pytest.mark.whole
needs_benchmarks = pytest.mark.skipif(
    not measured.runs(), reason="the results of the benchmarks are in the repository only"
)


@needs_benchmarks
@pytest.mark.parametrize("of", [speed.CPU, speed.GPU], ids=["cpu", "gpu"])
def test_the_first_picture_of_performance_has_about_a_dozen_bars_of_the_newest_run(of, tmp_path):
    pytest.importorskip("matplotlib")
    run = of.run()
    groups = of.groups(run)
    bars = [bar for bars in groups.values() for bar in bars]
    assert 6 <= len(bars) <= 16
    measured_ratios = {r["ratio"] for r in run.readings if not r["noisy"]}
    assert {bar.ratio for bar in bars} <= measured_ratios
    if of is speed.CPU:
        readings = {(r["group"], r["name"].removesuffix(" out="), r["peer"]): r for r in run.readings}
        reading = readings["forward", "sparsemax 64x32000 normal", "torch.softmax"]
        assert reading["noisy"] or speed.Bar("sparsemax", reading["ratio"]) in groups["64 rows of 32,000 classes"]
    body = speed.overview(tmp_path, of)
    assert run.machine in body
    for path in sorted(tmp_path.glob("*.svg")):
        assert f"/generated/{path.name}" in body
    assert len(list(tmp_path.glob("*.svg"))) == 2


def test_a_noisy_bar_is_left_out_and_no_run_is_said():
    reading = {"group": "forward", "name": "sparsemax 64x32000 normal", "peer": "torch.softmax", "ratio": 0.5}
    run = measured.Run("one", {}, [{**reading, "noisy": True}])
    assert speed.on_cpu(run) == {}
    run = measured.Run("one", {}, [{**reading, "noisy": False}])
    assert speed.on_cpu(run) == {"64 rows of 32,000 classes": [speed.Bar("sparsemax", 0.5)]}


def test_a_picture_has_a_version_for_each_theme(tmp_path):
    """The same lines; in the dark one what is neutral is light, and no ground covers the page."""
    plt = pytest.importorskip("matplotlib.pyplot")

    def picture(plt):
        figure, ax = plt.subplots()
        ax.plot([0, 1], color="#123456")
        ax.set_xlabel("words")
        return figure

    target = tmp_path / "one.svg"
    assert pictures.old(target, [__file__])
    pictures.save(target, picture)
    assert not pictures.old(target, [__file__])
    light, dark = (path.read_text(encoding="utf-8") for path in (target, pictures.dark(target)))
    assert "#123456" in light
    assert "#123456" in dark
    assert "fill: #ffffff" in light
    assert "fill: #ffffff" not in dark
    assert pictures.INK in dark
    assert pictures.INK not in light
    assert plt.rcParams["text.color"] != pictures.INK
    shown = pictures.shown("/generated/one.svg", "Some words.")
    assert re.findall(r"{image} (\S+)", shown) == ["/generated/one.svg", "/generated/one-dark.svg"]
    assert re.findall(r"only-\w+", shown) == ["only-light", "only-dark"]
    pictures.dark(target).unlink()
    assert pictures.old(target, [__file__])


def test_every_picture_of_the_maps_and_scores_has_its_dark_version(tmp_path):
    pytest.importorskip("matplotlib")
    page = next(page for page in maps.pages() if page.kind is anymax.Sparsemax)
    maps.draw(page, tmp_path)
    for family in scores.pages():
        if family.name in ("temperature", "noise", "margins"):  # one of each kind
            scores.draw(family, tmp_path / f"{family.name}.svg")
    names = {path.stem for path in tmp_path.glob("*.svg")}
    drawn = [f"sparsemax-{panel}" for panel in ("curves", "simplex", "losses", "jacobian")]
    assert names == {f"{name}{end}" for name in (*drawn, "temperature", "noise", "margins") for end in ("", "-dark")}
    assert set(re.findall(r"{image} (\S+)\.svg", maps.portrait(page))) == {n for n in names if "sparsemax" in n}


def test_the_addresses_are_those_of_the_project_file(tmp_path):
    """One setting, and the repository is in the top bar and on the start page; without it nothing is said."""
    own = tmp_path / "pyproject.toml"
    own.write_text('[project]\nname = "anymax"\n', encoding="utf-8")
    assert project.links(own) == ""
    assert project.icons(own) == []
    own.write_text(
        '[project]\nname = "anymax"\n[project.urls]\nDocumentation = "https://docs.example"\nSource = "https://code.example"\n'
        'Issues = "https://code.example/issues"\nPaper = "https://paper.example"\n',
        encoding="utf-8",
    )
    assert project.links(own) == (
        "[Source](https://code.example) · [Issues](https://code.example/issues) · [Paper](https://paper.example)"
    )
    assert [icon["name"] for icon in project.icons(own)] == ["Source", "Issues"]
    assert "generated/parts/repository.md" in (DOCS / "index.md").read_text(encoding="utf-8")


# -- the search ----------------------------------------------------------------------------------------------------------


def built(folder, **pages):
    """A small site of these pages."""
    pytest.importorskip("sphinx")
    from sphinx.application import Sphinx

    source = folder / "source"
    source.mkdir(parents=True)
    static = folder / "static"
    search.write(static)
    settings = [
        "html_copy_source = False",
        f"templates_path = [{str(DOCS / '_templates')!r}]",
        f"html_static_path = [{str(DOCS / '_static')!r}, {str(static)!r}]",
    ]
    (source / "conf.py").write_text("\n".join(settings), encoding="utf-8")
    for name, body in pages.items():
        (source / f"{name}.rst").write_text(body, encoding="utf-8")
    app = Sphinx(source, source, folder / "site", folder / "trees", "html", status=None, warning=None)
    app.build()
    return folder / "site"


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="the site's search runs in Node")
INDEX = "Start\n=====\n\n.. toctree::\n\n   one\n   two\n"


@needs_node
@pytest.mark.filterwarnings("ignore")
def test_the_search_is_asked_whether_it_finds_the_right_page_first(tmp_path):
    one = "Entmax\n======\n\n{}\n\nAlpha can be learned.\n"
    two = "Learnable alpha elsewhere\n=========================\n\n{}\n\nOther words.\n"
    entry = ".. index:: ! {}"
    bare = built(tmp_path / "a", index=INDEX, one=one.format(""), two=two.format(""))
    assert search.problems(bare, {"learnable alpha": "one"}) == ["search: 'learnable alpha' finds two first, not one"]
    assert search.problems(bare, {"nowhere at all": "one"}) == ["search: 'nowhere at all' finds nothing first, not one"]
    good = built(tmp_path / "b", index=INDEX, one=one.format(entry.format("Learnable alpha")), two=two.format(""))
    assert search.problems(good, {"learnable alpha": "one"}) == []
    both = built(
        tmp_path / "c", index=INDEX, one=one.format(entry.format("same")), two=two.format(entry.format("same"))
    )
    assert search.problems(both, {}) == ["search: 2 pages have the entry 'same': one, two"]


@needs_node
@pytest.mark.filterwarnings("ignore")
def test_the_search_lists_a_page_once_and_records_last(tmp_path):
    page = "{0}\n======\n\n.. index:: ! {0}, ! {0}s\n\nWords on zeros.\n\nZeros\n-----\n\nMore of {0}.\n"
    index = "Start\n=====\n\n.. toctree::\n\n   entmax\n   evidence\n   changelog\n"
    record = "{0}\n========\n\nZeros\n-----\n\nZeros and more zeros of entmax.\n"
    evidence, changes = record.format("Evidence"), record.format("Changes!")
    site = built(tmp_path / "a", index=index, entmax=page.format("Entmax"), evidence=evidence, changelog=changes)
    entmax, zeros, evidence = search.ask(site, ["entmax", "zeros", "evidence"])
    assert entmax == ["entmax", "index", "changelog", "evidence"]
    assert zeros == ["entmax", "index", "changelog", "evidence"]
    assert evidence[0] == "evidence", "a record comes first for its own title"
    assert search.problems(site, {}) == []
    (site / "_static" / "found.js").write_text("", encoding="utf-8")  # Sphinx's own search
    wrong = search.problems(site, {"zeros": "entmax"})
    assert any("lists" in line and "more than once" in line for line in wrong)
    assert "search: 'zeros' finds changelog first, not entmax" in wrong


EXCERPTS = """
<main role="main"><article class="bd-article"><h1>Entmax<a class="headerlink">#</a></h1>
<p>A map with <span class="math">\\(\\alpha = 1.5\\)</span>
and <span class="math">\\(\\frac{1}{2}\\)</span> between softmax and sparsemax.</p>
<div class="math">\\[\\max_p \\langle p, x \\rangle\\]</div><span id="index-0"></span>
<div class="highlight"><pre><span class="gp">&gt;&gt;&gt; </span>anymax.entmax_bisect(x)  # only in code</pre></div>
</article><nav>On this page</nav></main>
"""


def test_excerpts_are_words(tmp_path):
    chromium = pytest.importorskip("chromium")
    if chromium.path() is None:
        pytest.skip("needs Chromium")
    search.write(tmp_path)
    code = (tmp_path / "records.js").read_text(encoding="utf-8") + (DOCS / "_static/found.js").read_text(
        encoding="utf-8"
    )
    page = tmp_path / "page.html"
    page.write_text(
        f"<!doctype html><html data-ready='true'><script>const Search = {{ _performSearch: () => [] }};</script><script>{code}</script>",
        encoding="utf-8",
    )
    with contextlib.closing(chromium.Chromium()) as browser:
        browser.open(page.as_uri())

        def excerpt(word, anchor=""):
            return browser.js(
                f"Search.makeSearchSummary({json.dumps(EXCERPTS)}, new Set([{word!r}]), {anchor!r}).textContent"
            )

        prose = "Entmax A map with α = 1.5 and … between softmax and sparsemax."
        assert excerpt("softmax") == excerpt("softmax", "#index-0") == prose
        assert excerpt("bisect") == f"{prose} anymax.entmax_bisect(x) # only in code"


def entries_of(page):
    """The words by which the search is to find a page: those of its head, or of its index."""
    body = page.read_text(encoding="utf-8")
    if page.parent.name in ("maps", "scores") and page.stem != "README":
        return re.findall(r"^search: (.+)$", body.partition("\n\n")[0], flags=re.M)[0].lower().split(", ")
    return [e.lower() for line in re.findall(r"^<!-- index: (.+) -->$", body, flags=re.M) for e in line.split(", ")]


def test_what_newcomers_search_for_is_an_entry_of_the_page_that_they_want():
    for query, page in search.FIRST.items():
        path = DOCS / f"{page.removeprefix('generated/')}.md"
        assert query in entries_of(path), (query, page)


def test_no_two_pages_have_the_same_entry():
    pages = [path for folder in ("", "maps", "scores") for path in sorted((DOCS / folder).glob("*.md"))]
    words = [word for page in pages for word in entries_of(page)]
    assert len(words) > 80
    assert [word for word in set(words) if words.count(word) > 1] == []
