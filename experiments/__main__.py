"""`python -m experiments`: every experiment and its claims, with the verdicts of the saved results, alone and together."""

from __future__ import annotations

import importlib
import json

from . import NAMES
from ._report import RESULTS
from ._together import words


def main() -> int:
    for name in NAMES:
        experiment = importlib.import_module(f"{__package__}.{name}").EXPERIMENT
        saved = RESULTS / f"{name}.json"
        known = json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else {"claims": []}
        said = {claim["key"]: claim["verdict"] for claim in known["claims"]}
        print(f"python -m {__package__}.{name}   {experiment.title}\n    {experiment.about}")
        for key, claim in experiment.claims.items():
            print(f"    {said.get(key, 'not run yet'):>12}: {claim.text} ({claim.source})")
        print()
    print(words())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
