"""The explorer's modules, through Node: what people paste, the address, formulas, steps back, colours and the story."""

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from colours import SEEN, linear
from explorer_at_work import SCREENS

import anymax

GOOD = {
    "2 1 0.1 -1": [2, 1, 0.1, -1],
    "[2.0, 1.0, 0.1, -inf]": [2, 1, 0.1, -math.inf],
    "tensor([[ 1.5000, -2.0000e-01,  3.]], device='cuda:0', grad_fn=<AddBackward0>)": [1.5, -0.2, 3],
    "array([1., 2.],\n      dtype=float32)": [1, 2],
    "1;2\n3\t\u22124": [1, 2, 3, -4],
    "[[1 2\n  3]]": [1, 2, 3],
    "1,5": [1, 5],
    "1,2,3": [1, 2, 3],
    "1, 2, 3": [1, 2, 3],
    "1,5 2.5": [1, 5, 2.5],
    "[1,2,\n 3,4]": [1, 2, 3, 4],
}
TWO_READINGS = {  # with decimal commas, with commas between numbers
    "1,5 2,5": ([1.5, 2.5], [1, 5, 2, 5]),
    "-0,25; 3; 1,5": ([-0.25, 3, 1.5], [-0.0, 25, 3, 1, 5]),
    "1,5, 2,5": ([1.5, 2.5], [1, 5, 2, 5]),
    "[0,1 -inf 2,75]": ([0.1, -math.inf, 2.75], [0, 1, -math.inf, 2, 75]),
}
ROWS = {
    "cat: 2.0, dog: 1.2": ([2, 1.2], ["cat", "dog"]),
    '{"cat": 2, "the dog": -1.5}': ([2, -1.5], ["cat", "the dog"]),
    "cat = 2,5\ndog = -inf; fox=1": ([2.5, -math.inf, 1], ["cat", "dog", "fox"]),
    "tensor([1., 2.], device='cuda:0')": ([1, 2], None),
    "array([1., 2.], dtype=float32)": ([1, 2], None),
}
BAD = {
    "": "no numbers",
    "1 2 x3": 'Entry 3, "x3", is not a number',
    "1 nan 2": "Entry 2, nan, is not a score",
    "1 inf": "Entry 2, inf, is not a score",
    "1 1e999": "is not a score",
    "[1, 2, ..., 9]": "shortened when it was printed",
    "[[1, 2], [3, 4]]": "2 rows",
    "7": "one score",
    "-inf -inf": "Every score is -inf",
    " ".join(["1"] * 20001): "20001 scores",
}


NAMES = {  # what is written for so many classes -> their names
    (" cat ,, big\tdog\u0007,,", 5): ["cat", "", "big dog"],
    ("x" * 99, 2): ["x" * 24],
    ("a\u202eb, \u2066\u2069, c\u200bd\u00ade, क\u094d\u200dष, f\u2028g", 5): [
        "a b",
        "",
        "c d e",
        "क\u094d\u200dष",
        "f g",
    ],
}
WAYS = ("decimal", "separator")


@pytest.fixture(scope="module")
def read(ask):
    """What the page reads of all these texts, in one run of Node."""
    asked = {text: {"ask": "parse", "text": text} for text in (*GOOD, *BAD, *TWO_READINGS)}
    asked |= {(text, way): {"ask": "parse", "text": text, "comma": way} for text in TWO_READINGS for way in WAYS}
    asked |= {("row", text): {"ask": "row", "text": text} for text in (*ROWS, "cat: 2, 1")}
    asked |= {given: {"ask": "names", "text": given[0], "count": given[1]} for given in (*NAMES, ("a,b,c", 2))}
    return dict(zip(asked, ask(*asked.values()), strict=True))


@pytest.mark.whole
@pytest.mark.parametrize("text", GOOD)
def test_scores_are_read_as_people_paste_them(read, text):
    assert read[text].get("answer") == GOOD[text]


@pytest.mark.whole
@pytest.mark.parametrize(("text", "words"), BAD.items(), ids=BAD.values())
def test_what_is_no_row_of_scores_is_said(read, text, words):
    assert words in read[text].get("error", "")


@pytest.mark.whole
@pytest.mark.parametrize("text", TWO_READINGS)
def test_a_comma_with_two_readings_is_asked_about(read, text):
    assert "can be read in two ways" in read[text].get("error", "")
    assert [(r["way"], r["scores"]) for r in read[text]["readings"]] == list(zip(WAYS, TWO_READINGS[text]))
    assert tuple(read[text, way]["answer"] for way in WAYS) == TWO_READINGS[text]


@pytest.mark.parametrize("text", ROWS)
def test_names_are_read_with_the_scores(read, text):
    found = read["row", text]["answer"]
    assert (found["scores"], found["names"]) == ROWS[text]


@pytest.mark.parametrize("given", NAMES, ids=["blanks", "long", "invisible"])
def test_names_are_read_alone(read, given):
    assert read[given]["answer"] == NAMES[given]


def test_names_that_are_wrong_are_said(read):
    assert 'Entry 1, "cat:", is not a number' in read["row", "cat: 2, 1"]["error"]
    assert "3 names for 2 classes" in read["a,b,c", 2]["error"]


@pytest.mark.whole
def test_the_address_holds_the_whole_state(ask):
    given = {
        **SCREENS["all settings"],
        "x": [0.1, -math.inf, 1e-7, 12345.678, 3, 4],
        "names": ["cat", "", 'ü & #100% = "owl"', "狐"],
        "maps": ["relu", "topp"],
        "focus": "topp",
        "heat": "entropy",
        "probe": [-1.25, 3],
        "sorted": True,
        "draws": 100,
        "seed": 7,
    }
    wrong = "#x=1,oops&maps=softmax,nomax&T=99&k=2.5&y=9&order=3&noise=pink&at=7&new=1&alpha=2&story=9"
    back, partly, odd = ask(
        {"ask": "turn", "given": given},
        {"ask": "hash", "text": wrong},
        {"ask": "hash", "text": "#x=1,2&names=a,b,c&story=2"},
    )
    assert back["answer"]["complaints"] == []
    assert back["answer"]["state"] == given
    state, complaints = partly["answer"]["state"], " ".join(partly["answer"]["complaints"])
    assert state["x"] == [2, 1.2, 0.4, -0.3, -1.5]
    assert (state["alpha"], state["T"], state["k"]) == (2, 1, 2)
    for words in (
        "x=1,oops: Entry 2", "no map nomax", "Temperature goes from 0.1 to 10", "k goes from 1 to 20 in steps of 1", "y=9",
        "Taylor order", "noise=pink", "at=7", "new, which this page doesn't know", "story=9",
    ):  # fmt: skip
        assert words in complaints
    assert "names=a,b,c: these are 3 names for 2 classes" in " ".join(odd["answer"]["complaints"])
    assert (back["answer"]["story"], odd["answer"]["story"]) == (0, 2)


# -- formulas, steps back, looks, the story ---------------------------------------------------------------------------

TYPESET = {
    "softmax": "p=exp(x−τ)",
    "entmax": "p=[(α−1)(x−τ)]_{+}^{1/(α−1)}",
    "sparsemax": "p=[x−τ]_{+}",
    "normmax": "p=argmax⟨p,x⟩−‖p‖_{α}",
    "topk": "softmax over the k largest",
    "topp": "softmax over the nucleus of mass p",
    "budget": "p=clip(x−τ,0,1),Σp=k",
    "perturb": "p_{i}=P[argmax(x+ε)=i]",
    "taylor": "p∝1+x+{x^{2}}/{2}+…+{x^{m}}/{m!}",
    "sigsoftmax": "p∝exp(x)σ(x)",
    "square": "p∝x^{2}",
    "sigmoid": "p∝σ(x)",
    "sink": "p=entmax(x,s)",
    "relu": "p∝[x]_{+}",
}


def as_text(node):
    parts = [as_text(child) for child in node]
    if node.tag == "mfrac":
        return f"{{{parts[0]}}}/{{{parts[1]}}}"
    if node.tag in ("msub", "msup", "msubsup"):
        signs = {"msub": "_", "msup": "^", "msubsup": "_^"}[node.tag]
        return parts[0] + "".join(f"{sign}{{{part}}}" for sign, part in zip(signs, parts[1:]))
    assert node.tag in ("math", "mrow", "mi", "mn", "mo", "mtext", "mspace"), node.tag
    return (node.text or "") + "".join(parts)


@pytest.mark.whole
def test_formulas_are_typeset(ask):
    formulas, words = (reply["answer"] for reply in ask({"ask": "formulas"}, {"ask": "words"}))
    assert {key: as_text(ET.fromstring(text)).replace("\u00a0", " ") for key, text in formulas.items()} == TYPESET
    assert sum("<math" in text for text in words) == 1
    assert not [text for text in words if "$" in text]


@pytest.mark.whole
def test_steps_back_and_forth(ask):
    def seen(*steps):
        return ask({"ask": "steps", "steps": list(steps)})[0]["answer"]

    drag = [{"x": 1, "kind": "drag 1"}, {"x": 2, "kind": "drag 1"}, {"x": 3, "kind": "drag 1"}, "close"]
    assert seen(*drag, "back", "forth") == [1, 2, 3, 3, 0, 3]  # a drag is one step
    assert seen(*drag, {"x": 4, "kind": "drag 1"}, "back", "back", "back") == [1, 2, 3, 3, 4, 3, 0, 0]
    assert seen({"x": 1}, {"x": 1}, {"x": 2}, "back", "back") == [1, 1, 2, 1, 0]  # what changes nothing is no step
    # a change ends what could be done again
    assert seen({"x": 1}, "back", {"x": 5}, "forth", "back") == [1, 0, 5, 5, 0]
    assert seen(*({"x": i} for i in range(1, 250)), *["back"] * 300)[-1] == 49


def light_of(colours):
    return linear(np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours]))


def oklab(rgb):
    cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.cbrt(np.clip(rgb, 0, 1) @ np.transpose(cones)) @ np.transpose(lab)


def nearest(lab):
    return (np.linalg.norm(lab[:, None] - lab, axis=-1) + 9 * np.eye(len(lab))).min()


@pytest.mark.whole
def test_colours_and_signs_tell_the_maps_apart(ask, maps):
    looks = ask({"ask": "looks"})[0]["answer"]
    assert looks.keys() == maps.keys()
    assert len({look["sign"] for look in looks.values()}) == len(maps)
    for theme, papers in enumerate((("#ffffff", "#f2eee5"), ("#1b1b20", "#232329"))):
        rgb = light_of([look["inks"][theme] for look in looks.values()])
        for kind, matrix in SEEN.items():  # less where colours are confused, so that the sign has to help
            assert nearest(oklab(rgb @ np.transpose(matrix))) > (0.09 if kind == "all" else 0.025), (theme, kind)
        light = rgb @ [0.2126, 0.7152, 0.0722]
        for paper in light_of(papers) @ [0.2126, 0.7152, 0.0722]:
            assert ((np.maximum(light, paper) + 0.05) / (np.minimum(light, paper) + 0.05)).min() >= 3, theme


@pytest.mark.whole
def test_the_story_says_what_the_library_computes(ask):
    begin, end = (reply["answer"] for reply in ask({"ask": "story", "along": 0}, {"ask": "story", "along": 1}))
    assert [step["title"] for step in begin] == [
        "From argmax to softmax", "From softmax to sparsemax", "Entmax, in between", "The loss", "The Jacobian",
    ]  # fmt: skip
    assert [step["parts"][1:] for step in begin] == [[], [], [], ["gradient", "losses"], ["jacobian"]]
    x = np.array(begin[0]["state"]["x"])
    cat, *_, owl = anymax.softmax(x / 0.1)
    assert begin[0]["now"] == f"T = 0.10: cat gets {cat:.3f}, owl below 0.0001"
    assert owl < 0.00005
    cat, *_, owl = anymax.softmax(x)
    assert end[0]["now"] == f"T = 1.00: cat gets {cat:.3f}, owl {owl:.4f}"
    far = np.array(end[1]["state"]["x"])
    assert (
        end[1]["now"]
        == f"score of fox {far[2]:.2f}: {anymax.softmax(far)[2]:.2f} under softmax, exactly 0 under sparsemax"
    )
    assert anymax.sparsemax(far)[2] == 0 < anymax.sparsemax(begin[1]["state"]["x"])[2]
    for i in (2, 4):  # alpha is what moves
        assert (begin[i]["state"]["alpha"], end[i]["state"]["alpha"]) == (1, 2)
    assert begin[2]["now"] == "α = 1.00: 4 of 4 animals above 0"
    assert end[2]["now"] == f"α = 2.00: {(anymax.sparsemax(x) > 0).sum()} of 4 animals above 0" != begin[2]["now"]
    ahead = end[3]["state"]["x"]
    losses = [
        float(anymax.fenchel_young(kind, ahead, 0))
        for kind in (anymax.Softmax(), anymax.Entmax(1.5), anymax.Sparsemax())
    ]
    assert losses[2] == 0 < losses[1] < 0.005
    assert (
        end[3]["now"]
        == f"score of cat 3.00; loss {losses[0]:.2f} (softmax), below 0.01 (entmax), exactly 0 (sparsemax)"
    )
    zeros = (anymax.jacobian(anymax.Sparsemax(), x) == 0).sum()
    assert (begin[4]["now"], end[4]["now"]) == (
        "α = 1.00: 0 of 16 entries exactly 0",
        f"α = 2.00: {zeros} of 16 entries exactly 0",
    )
    assert all("<math" in step["words"] and "$" not in step["words"] for step in begin)
