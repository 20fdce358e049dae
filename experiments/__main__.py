"""`python -m experiments`: every experiment and its claims, with the verdicts of the saved results, alone and together.

`--pages` writes the pages of the saved results anew, from their JSON files.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence

from . import NAMES
from ._common import sources
from ._report import RESULTS, Findings, cut, pages, save, verdicts
from ._together import words


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description="Every experiment, its claims and their verdicts."
    )
    parser.add_argument(
        "--pages", action="store_true", help="write the pages of the saved results anew, from their JSON files"
    )
    if parser.parse_args(arguments).pages:
        _said_anew()
        print("written:", *pages(RESULTS))
        return 0
    seconds = 0.0
    for name in NAMES:
        experiment = importlib.import_module(f"{__package__}.{name}").EXPERIMENT
        saved = RESULTS / f"{name}.json"
        known = json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else {"claims": []}
        said = {claim["key"]: claim["verdict"] for claim in known["claims"]}
        then = known.get("sources", {})
        changed = [tree for tree, digest in sources(name).items() if tree in then and then[tree] != digest]
        print(f"python -m {__package__}.{name}   {experiment.title}\n    {experiment.about}")
        if "seconds" in known:
            seconds += known["seconds"]
            print(f"    saved on {known['date']}: {known['seconds'] / 60:.0f} minutes, threads: {known['threads']}")
        if changed:
            print(f"    changed since the saved run: {', '.join(changed)}")
        for key, claim in experiment.claims.items():
            print(f"    {said.get(key, 'not run yet'):>12}: {claim.text} ({claim.source})")
        print()
    print(f"All saved runs together took {seconds / 3600:.1f} hours.\n")
    print(words())
    return 0


def _said_anew() -> None:
    """What the scripts say now of their claims and of trainings that were not over, in the saved results.

    Where the words of a claim differ from the saved ones, its results are those of another claim, and stay as they are. A claim of
    `afterwards` is tested on the figures that are there.
    """
    for path in sorted(RESULTS.glob("*.json")):
        known = json.loads(path.read_text(encoding="utf-8"))
        module = importlib.import_module(f"{__package__}.{known['name']}")
        claims = module.EXPERIMENT.claims
        then = {one["key"]: one["claim"] for one in known["claims"]}
        added = claims.keys() - then.keys()
        if then != {key: one.text for key, one in claims.items() if key in then} or (
            added and not hasattr(module, "afterwards")
        ):
            continue
        if added:
            found = Findings(known["name"], claims, RESULTS, tables=known["tables"], tests=known["tests"])
            module.afterwards(found)
        if hasattr(module, "edges"):
            cut(known["tests"], module.edges(known["tables"], known["tests"]))
        said = verdicts(claims, known["tests"])
        known["claims"] = [{"key": key, **one.words(), "verdict": said[key]} for key, one in claims.items()]
        if "lengths" not in known:
            known = {**{k: known[k] for k in ("name", "title")}, "lengths": module.EXPERIMENT.lengths, **known}
        save(path, known)


if __name__ == "__main__":
    raise SystemExit(main())
