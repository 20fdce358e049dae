"""What a new name, map, page or source must also be in: each place that is forgotten is named within seconds."""

import inspect
import re
from pathlib import Path

import pytest

import anymax
from anymax._core import typing as types
from anymax.kernels import link
from anymax.mappings import CATALOGUE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
if not DOCS.is_dir():
    pytest.skip("only in the repository", allow_module_level=True)

from generator import api, forge, readme, scores

from tools import explorer

PUBLIC = """
    Mapping Separable RatioMap Facts Noise Sinkhorn
    apply log_apply softmax log_softmax logsumexp sparsemax entmax entmax15 taylor_softmax sparse_softmax sigsoftmax
    perturb_max normmax budget threshold
    fenchel_young nll cross_entropy sparsemax_loss entmax_loss entmax15_loss sparse_softmax_loss taylor_softmax_loss normmax_loss
    perturb_max_loss accuracy_loss smoothed_nll stop_gradient_loss multilabel_softmax_loss margin_loss
    transforms margins temperature mask prior normalize topk topp minp cosine compose mix
    sample gumbel_max gumbel_softmax
    soft_rank soft_sort soft_permutation
    attention attention_varlen linear_attention LinearState
    Segments segment_apply segment_log_apply segment_logsumexp segment_threshold segment_loss segment_sample segment_entropy
    segment_support linear_loss linear_kl linear_log_prob linear_log_prob_entropy linear_topk_kl contrastive_loss
    log_prob log_prob_entropy topk_kl
    jacobian entropy support facts logit_gap check_mapping
    choose explain explain_attention use show_config __version__
""".split()
MOST = 110  # names in the root; what is rarer is in its module
MOVED = {
    "transforms": "epsilon_cutoff eta logit_bias repetition_penalty scalable topnsigma typical xtc",
    "sampling": "gumbel_topk perturb_argmax speculative_accept topk_log_prob",
    "likelihood": "kl",
    "inspection": "jacobian_norm",
    "kernels": "warm_up",
    "thresholds": "Threshold",
    "linear": "linear_threshold",
}
TRANSFORMS = "temperature mask prior normalize topk topp minp scalable cosine compose mix".split()


def test_public_names_are_these():
    """A name that comes or goes is a decision: it belongs in this list and in the changelog. The maps are those of the catalogue."""
    assert sorted(anymax.__all__) == sorted([*PUBLIC, *(kind.__name__ for kind in CATALOGUE)])
    assert all(hasattr(anymax.transforms, name) for name in TRANSFORMS)


def test_the_root_is_small_and_says_where_its_former_names_are():
    assert len(anymax.__all__) <= MOST
    for home, names in MOVED.items():
        for name in names.split():
            assert getattr(getattr(anymax, home), name).__name__ == name
            with pytest.raises(AttributeError, match=rf"anymax\.{name} is now anymax\.{home}\.{name}$"):
                getattr(anymax, name)


# -- the pages ---------------------------------------------------------------------------------------------------------------


def test_every_transform_and_margin_is_on_a_page():
    everything = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "scores").glob("*.md"))
    missing = [name for name in scores.public() if not re.search(rf"\b{name}\b", everything)]
    assert not missing, f"describe {', '.join(missing)} in docs/scores/"


def test_every_page_of_the_api_is_in_one_group():
    assert sorted(" ".join(api.GROUPS.values()).split()) == sorted(api.PAGES)


def test_the_table_of_the_readme_is_made_of_the_catalogue():
    """`(cd docs && python -m generator.readme)` writes it."""
    held = readme.README.read_text(encoding="utf-8")
    assert readme.written(held) == held
    assert readme.written(held.replace("| the default |", "| never |")) == held


def test_the_tables_in_pages_are_those_of_the_results():
    """`(cd docs && python -m generator.readme)` writes them."""
    seen = set()
    for path in readme.written_pages():
        held = path.read_text(encoding="utf-8")
        assert readme.renewed(held) == held, path.name
        seen |= set(re.findall(r"<!-- made: (\w+) -->", held))
    assert seen == readme.MADE.keys()


def test_a_page_can_be_read_on_a_forge():
    """What the site includes has a line that says where to read it; links lead to files, and on the site to pages."""
    for path in DOCS.glob("*.md"):
        page = path.read_text(encoding="utf-8")
        words = re.sub(r"(?ms)^(```+|:::+)\w.*?^\1$|<!-- site\n.*?-->", "", page)
        shown_raw = ("{doc}", "{ref}", *([] if path.stem == "index" else [":::"]))
        assert not [markup for markup in shown_raw if markup in page], path.name
        assert not re.search(r"</summary>\n(?!\n)", page), path.name  # Markdown begins after an empty line
        links = {link for link in re.findall(r"\]\(([^)#\s]+)", words) if "://" not in link}
        assert not [link for link in links if not (DOCS / link).exists()], path.name
        if "include}" in page:
            assert re.search(r"(?m)^> In the repository.*\]\(", page), path.name
        for target in re.findall(r"\]\(([^)#\s]+)", forge.on_site(words)):
            assert "://" in target or "../" not in target, (path.name, target)


def test_every_page_is_linked():
    """Each hand-written page is in the contents of another one."""
    pages = sorted(DOCS.glob("*.md"))
    contents = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    entries = set(re.findall(r"^(?:[^\n<]*<)?([\w/*]+)>?$", contents, flags=re.M))
    for page in pages:
        assert page.stem == "index" or any(Path(page.stem).match(entry) for entry in entries), page.stem


def test_the_types_of_signatures_are_explained():
    explained = {name for names in api.TYPES for name in names.split(", ")}
    written = set()
    for name in anymax.__all__:
        if inspect.isfunction(thing := getattr(anymax, name)):
            parameters = inspect.signature(thing).parameters.values()
            written |= {word for p in parameters for word in re.findall(r"\w+", str(p.annotation))}
    assert explained - {"Array", "AnyArray"} <= written
    assert vars(types).keys() & written <= explained | {"Any", "Literal", "Sequence"}


def test_the_explorers_page_is_that_of_its_sources():
    """Its kernels are compiled of `csrc/`."""
    assert explorer.staleness() == ""


# -- the compiled library ---------------------------------------------------------------------------------------------------


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_codes_of_python_are_those_of_the_header():
    header = read("csrc/anymax.h")

    def codes(kind):
        body = re.search(rf"enum anymax_{kind} \{{(.*?)\}};", header, flags=re.S)[1]
        return [
            name.lower()
            for name in re.findall(r"ANYMAX_(?!MAPS|OPS)(\w+) = \d+", re.sub(r"/\*.*?\*/", "", body, flags=re.S))
        ]

    assert [name.replace("perturb_max", "perturb") for name in link.MAPS] == codes("map")
    assert list(link.MAPS.values()) == list(range(len(link.MAPS)))
    assert list(link.NOISES) == codes("noise")
    assert len(link.CODES) == len(codes("op"))
    assert list(link.CODES.values()) == list(range(len(link.CODES)))
    rows = re.findall(r"^    \{ANYMAX_\w+, (.*)\},", read("csrc/maps.hpp"), flags=re.M)
    assert len(rows) == len(link.MAPS)
    for name, row in zip(link.MAPS, rows, strict=True):
        _, family, low, high, _, _, log, _, *slope = row.split(", ")
        assert family.lower() == link.KINDS[name].family, name
        assert log == str(link.KINDS[name].log).lower(), name
        assert (slope == ["true"]) == (name in link.WITH_SLOPE), name
        if name in link.RANGES:
            assert float(low) <= max(link.RANGES[name][0], 1.0000000000000002 * (name == "normmax")), name
            assert float(high) >= link.RANGES[name][1], name


def test_cmake_names_every_source_and_no_other():
    cmake = read("CMakeLists.txt")
    named = set(re.findall(r"(?:csrc/doors|cmake)/\w+\.cpp", cmake))
    assert 'csrc/units/*.cpp"' in cmake
    assert 'csrc/doors/python/*.cpp"' in cmake
    named |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").glob("units/*.cpp")}
    assert named == {
        path.relative_to(ROOT).as_posix()
        for files in ("csrc/doors/*.cpp", "csrc/units/*.cpp", "cmake/*.cpp")
        for path in ROOT.glob(files)
    }


def test_the_units_of_cmake_are_those_of_the_dispatcher():
    cmake, cross = read("CMakeLists.txt"), read("tools/cross.sh")
    flags = {
        name: options.split() for name, options in re.findall(r"^set\(ANYMAX_FLAGS_(\w+) ?(.*)\)$", cmake, flags=re.M)
    }
    built = {unit for line in re.findall(r"set\(candidates (.*)\)", cmake) for unit in line.upper().split()}
    known = set(re.findall(r"defined\(ANYMAX_HAVE_(\w+)\)", read("csrc/doors/abi.cpp")))
    assert set(flags) == built
    assert known == built | {"SIMD128"}, "WebAssembly is built by tools/cross.sh"
    crossed = re.findall(r'^ +build \$target \S+ (?:"([^"]+)"|(\w+))', cross, flags=re.M)
    assert {unit for several, one in crossed for unit in (several or one).upper().split()} == known
    assert not any("fast-math" in line for line in re.findall(r"^set\(ANYMAX_FLAGS.*$", cmake, flags=re.M))
    assert not flags["BASELINE"]
    assert not flags["NEON"]
    assert set(flags["AVX2"]) < set(flags["AVX512"]) | {"-mavx2"}, "what a machine with AVX-512 has besides"


def test_the_supported_versions_are_those_of_the_project_and_its_workflows():
    """docs/versions.md beside pyproject.toml, constraints.txt, .github/previous.txt and the matrix of ci.yml."""
    if not (ROOT / ".github").exists():
        pytest.skip("only in the repository")
    page = (DOCS / "versions.md").read_text(encoding="utf-8")
    table = {
        row[0].strip(): [cell.strip() for cell in row[1:]]
        for row in re.findall(r"^\|([^|]*)\|([^|]*)\|([^|]*)\|$", page, flags=re.M)
    }
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    before = (ROOT / ".github" / "previous.txt").read_text(encoding="utf-8")
    for name, package in (
        ("NumPy", "numpy"),
        ("torch", "torch"),
        ("JAX", "jax"),
        ("scikit-learn", "scikit-learn"),
        ("transformers", "transformers"),
    ):
        least, run = table[name]
        assert re.search(rf'"{package}>={least.removesuffix(".0")}[".]', project), name
        now = ".".join(re.search(rf"^{package}==([\d.]+)$", pinned, flags=re.M)[1].split(".")[:2])
        assert now in run or name == "transformers", (name, now)
        older = re.search(rf"^{package}==([\d.]+)\.\*$", before, flags=re.M)
        assert older is None or older[1] in run, name
    matrix = re.search(r"python: \[(.*)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))[1]
    assert all(version in table["Python"][1] for version in re.findall(r"[\d.]+", matrix))
