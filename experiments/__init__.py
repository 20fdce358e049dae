"""The papers' tables, run again: one script a claim. `python -m experiments` lists them; README.md here says how to run them."""

# in this order
NAMES = (
    "multilabel", "proportions", "nli", "finetune", "seq2seq", "inflection", "intents", "verification", "overconfidence", "exact", "graphs",
    "conformal", "longtail", "length", "calibration", "noise", "router", "language", "statements", "attending",
)  # fmt: skip
