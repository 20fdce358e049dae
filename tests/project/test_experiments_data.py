"""Files of ANYMAX_DATA from small originals that the tests write: zips of PNGs, ARFF text, and what R's `save` writes."""

import lzma
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy")

from scipy import sparse

ROOT = Path(__file__).parents[2]
if not (ROOT / "experiments").exists():
    pytest.skip("only in the repository", allow_module_level=True)

from experiments import data
from experiments.data import mulan, omniglot, rcv1

pytestmark = pytest.mark.whole


def run(monkeypatch, module, checkout, out):
    """The exit status of the command with these folders."""
    monkeypatch.setattr(sys, "argv", [module.__name__, str(checkout), str(out)])
    return data.main("", module.convert)


def features(z):
    return sparse.csr_matrix((z["X_data"], z["X_indices"], z["X_indptr"]), shape=tuple(z["X_shape"])).toarray()


def labels(z):
    return np.unpackbits(z["Y"], axis=1)[:, : int(z["Y_shape"][1])]


# -- Mulan --------------------------------------------------------------------------------------------------------------------

COLUMNS = ("size numeric", "'it\\'s red' {1,0}", "colour {red, green, blue}", "word {0,1}")
HEAD = "@relation small\n" + "".join(f"@attribute {column}\n" for column in COLUMNS) + "@data\n"


@pytest.mark.parametrize("numbered", [False, True])
def test_a_file_of_mulan(tmp_path, monkeypatch, numbered):
    """Nominal and numeric features, sparse and dense rows, a quoted name, and labels anywhere among the attributes."""
    folder = tmp_path / "data" / "multi-label"
    folder.mkdir(parents=True)
    (folder / "a-train.arff").write_text(HEAD + "2.1,1,blue,0\n% a remark\n-1,0,green,1\n")
    (folder / "a-test.arff").write_text(HEAD + "{0 4, 2 red, 3 1}\n")
    (folder / "a.xml").write_text('<labels><label name="it\'s red"></label><label name="word"/></labels>')
    monkeypatch.setattr(mulan, "FILES", {"a": mulan.Source(("a-train.arff", "a-test.arff"), "a.xml", numbered)})
    assert run(monkeypatch, mulan, tmp_path, tmp_path / "out") == 0
    with np.load(tmp_path / "out" / "multilabel" / "a.npz") as z:
        if numbered:  # in the order of the file
            assert z["X_data"].dtype == np.float32
            np.testing.assert_array_equal(features(z), np.float32([[2.1, 2], [-1, 1], [4, 0]]))
        else:  # blue, green, red
            assert z["X_data"].dtype == np.float64
            np.testing.assert_array_equal(features(z), [[2.1, 1, 0, 0], [-1, 0, 1, 0], [4, 0, 0, 1]])
        np.testing.assert_array_equal(labels(z), [[1, 0], [0, 1], [0, 1]])
        np.testing.assert_array_equal(z["split"], [0, 0, 1])
        assert z["label_names"].tolist() == ["it's red", "word"]


def test_a_checkout_that_is_none(tmp_path, monkeypatch, capsys):
    for module in (mulan, omniglot, rcv1):
        assert run(monkeypatch, module, tmp_path, tmp_path / "out") == 2
        assert f"{tmp_path}/" in capsys.readouterr().err


def test_all_files_of_the_experiments_have_a_converter():
    from experiments import multilabel, verification

    made = {f"multilabel/{name}.npz" for name in mulan.FILES} | {omniglot.FILE, rcv1.FILE}
    assert {*multilabel.EXPERIMENT.data, *verification.EXPERIMENT.data} <= made


# -- Omniglot -----------------------------------------------------------------------------------------------------------------


def png(ink):
    """Black on white, a bit a pixel, as the originals are."""
    lines = b"".join(b"\0" + np.packbits(~line).tobytes() for line in ink)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", ink.shape[1], ink.shape[0], 1, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(text)) + name + text + struct.pack(">I", zlib.crc32(name + text)) for name, text in parts
    )


def zipped(path, drawings):
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{path.stem}/", "")
        for (alphabet, character, drawer), ink in drawings.items():
            file.writestr(f"{path.stem}/{alphabet}/character{character:02}/0{character}_{drawer:02}.png", png(ink))
        file.writestr(f"__MACOSX/{path.stem}/._a.png", b"")


def test_omniglot(tmp_path, monkeypatch):
    """Two sets that share an alphabet, their files in no order."""
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    ink = {
        (a, c, d): rng.random((7, 5)) < 0.4 for a in ("Latin", "Greek", "Ojibwe (1)") for c in (2, 1) for d in (10, 2)
    }
    parts = [{key: ink[key] for key in ink if key[0] != left_out} for left_out in ("Greek", "Ojibwe (1)")]
    for part, drawings in zip(omniglot.SETS, parts):
        zipped(tmp_path / "python" / f"{part}.zip", drawings)
    assert run(monkeypatch, omniglot, tmp_path, tmp_path) == 0
    with np.load(tmp_path / omniglot.FILE) as z:
        assert z["shape"].tolist() == [12, 7, 5]
        keys = [(a, int(c.removeprefix(f"{a}/character")), d) for a, c, d in zip(z["alphabet"], z["char"], z["drawer"])]
        assert keys == sorted(ink)
        drawn = np.unpackbits(z["bits"], axis=1)[:, :35].reshape(z["shape"])
    np.testing.assert_array_equal(drawn, [ink[key] for key in keys])

    parts[1]["Latin", 2, 10] = ~ink["Latin", 2, 10]
    zipped(tmp_path / "python" / f"{omniglot.SETS[1]}.zip", parts[1])
    with pytest.raises(ValueError, match="Latin/character02/10: the two sets have different drawings"):
        omniglot.read(tmp_path)


def test_drawings_of_the_file_of_omniglot(tmp_path):
    """What the experiment reads is what was drawn."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    from experiments import _characters

    ink = {("Latin", c, d): np.zeros((56, 56), dtype=bool) for c in (1, 2) for d in (1, 2, 3)}
    for (_, c, d), drawing in ink.items():
        drawing[10 * c : 10 * c + 8, 10 * d : 10 * d + 8] = True
    for part in omniglot.SETS:
        zipped(tmp_path / "python" / f"{part}.zip", ink)
    np.savez(tmp_path / "a.npz", **omniglot.read(tmp_path))
    read = _characters.omniglot(tmp_path / "a.npz")
    assert read.characters.tolist() == [0, 0, 0, 1, 1, 1]
    assert set(read.alphabets) == {"Latin"}
    for image, drawing in zip(read.images[:, 0].numpy(), ink.values()):
        np.testing.assert_array_equal(image > 0, drawing[::2, ::2])


# -- RCV1 ---------------------------------------------------------------------------------------------------------------------


def saved_by_r(name, value):
    """What R's save(name) writes of a value: numbers and words as arrays and lists, named lists as dicts."""
    symbols = []

    def symbol(word):
        if word in symbols:
            return struct.pack(">i", (symbols.index(word) + 1) << 8 | 255)
        symbols.append(word)
        return struct.pack(">i", 1) + text(word)

    def text(word):
        if word is None:
            return struct.pack(">ii", 9, -1)
        return struct.pack(">ii", 0x40009, len(word.encode())) + word.encode()

    def pair(word, item):
        return struct.pack(">i", 0x402) + symbol(word) + packed(item)

    def packed(item):
        if isinstance(item, dict):
            inner = b"".join(packed(one) for one in item.values())
            head = struct.pack(">ii", 0x313, len(item))
            ends = pair("names", list(item)) + pair("class", ["a"]) + struct.pack(">i", 254)
            return head + inner + ends
        if isinstance(item, list):
            return struct.pack(">ii", 16, len(item)) + b"".join(text(one) for one in item)
        whole = item.dtype.kind == "i"
        return struct.pack(">ii", 13 if whole else 14, len(item)) + item.astype(">i4" if whole else ">f8").tobytes()

    head = b"RDX2\nX\n" + struct.pack(">iii", 2, 0x30202, 0x20300)
    return lzma.compress(head + pair(name, value) + struct.pack(">i", 254))


WORDS, TOPICS, DOCUMENTS = 9, 3, 4


def subset(rng, shifts):
    """The features and labels of a made-up subset, and its table, in which the labels of each half stand so far to the left."""
    x, y = np.zeros((2 * DOCUMENTS, WORDS)), np.zeros((2 * DOCUMENTS, TOPICS))
    whole = np.zeros((2 * DOCUMENTS, WORDS + TOPICS))
    for i in range(2 * DOCUMENTS):
        shift = shifts[i // DOCUMENTS]
        some = WORDS - shift
        x[i, :some] = (rng.random(some) + 0.5) * (rng.random(some) < 0.6)
        y[i] = [i % 2, rng.random() < 0.5, (i + 1) % 2]
        whole[i, : WORDS - shift] = x[i, : WORDS - shift]
        whole[i, WORDS - shift : WORDS - shift + TOPICS] = y[i]
    return x, y, whole


def test_rcv1(tmp_path, monkeypatch):
    """Labels at another place in each half, a document twice in a subset, and one that is in two subsets."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "additional-data"
    folder.mkdir()
    xs, ys = [], []
    for k in rcv1.SUBSETS:
        x, y, whole = subset(rng, (0, k) if k < 5 else (4, 0))
        x[2], y[2], whole[2] = x[0], y[0], whole[0]
        if k > 1:
            x[DOCUMENTS], y[DOCUMENTS] = 0.0, ys[0][DOCUMENTS]
            x[DOCUMENTS, 0] = whole[DOCUMENTS, 0] = 1.0
            whole[DOCUMENTS, 1 : WORDS - (k if k < 5 else 0)] = 0.0
            start = WORDS - (k if k < 5 else 0)
            whole[DOCUMENTS, start : start + TOPICS] = y[DOCUMENTS]
        xs.append(x)
        ys.append(y)
        table = {f"Att{j + 1}": column for j, column in enumerate(whole.T[:WORDS])}
        table |= {f"Class{j + 1}": column for j, column in enumerate(whole.T[WORDS:])}
        table |= {".labelcount": whole[:, WORDS:].sum(axis=1), ".SCUMBLE": rng.random(2 * DOCUMENTS)}
        whole_object = {"name": ["a", None], "dataset": table, "index": np.arange(3), "labels": {"index": np.arange(2)}}
        (folder / f"rcv1sub{k}.rda").write_bytes(saved_by_r(f"rcv1sub{k}", whole_object))
    monkeypatch.setattr(rcv1, "convert", lambda checkout: [(rcv1.FILE, rcv1.read(checkout, WORDS, TOPICS, DOCUMENTS))])
    assert run(monkeypatch, rcv1, tmp_path, tmp_path) == 0

    seen, keep = [], []
    for i, row in enumerate(np.concatenate(xs)):
        if not any(np.array_equal(row, other) for other in seen):
            seen.append(row)
            keep.append(i)
    assert len(keep) == 5 * 2 * DOCUMENTS - 5 - 3  # one of each subset, and three of those that are in four
    with np.load(tmp_path / rcv1.FILE) as z:
        np.testing.assert_array_equal(features({**z, "X_data": z["X_data"].astype(np.float32)}), np.float16(seen))
        np.testing.assert_array_equal(labels(z), np.concatenate(ys)[keep])
        np.testing.assert_array_equal(z["subset"], np.repeat(rcv1.SUBSETS, 2 * DOCUMENTS)[keep])
        np.testing.assert_array_equal(z["half"], np.tile(np.repeat([0, 1], DOCUMENTS), 5)[keep])


def test_what_is_no_file_of_r(tmp_path):
    whole = lzma.decompress(saved_by_r("a", {"b": np.ones(3)}))
    for n, told in ((7, "early"), (40, "early"), (3, "early")):
        (tmp_path / "short.rda").write_bytes(lzma.compress(whole[:n]))
        with lzma.open(tmp_path / "short.rda") as file, pytest.raises(ValueError, match=told):
            rcv1.Reader(file).item()
    (tmp_path / "other.rda").write_bytes(lzma.compress(b"RDX3\nX\n" + whole[7:]))
    with lzma.open(tmp_path / "other.rda") as file, pytest.raises(ValueError, match="second format"):
        rcv1.Reader(file)
