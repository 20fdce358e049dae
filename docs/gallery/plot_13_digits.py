"""
A classifier of digits
======================

Linear classifiers of scikit-learn's small digits, trained with the losses of three maps.
"""

import matplotlib.pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from anymax import plot
from anymax.sklearn import MappingClassifier

X, y = load_digits(return_X_y=True)
seen, unseen, y_seen, y_unseen = train_test_split(
    X / 16.0, y, test_size=0.4, random_state=0
)
models = {
    name: MappingClassifier(name, C=1.0).fit(seen, y_seen)
    for name in ("softmax", "entmax15", "sparsemax")
}
p = {name: model.predict_proba(unseen) for name, model in models.items()}
for name, model in models.items():
    right, zeros = model.score(unseen, y_unseen), (p[name] == 0).mean()
    print(f"{name:10s} {right:.1%} right, {zeros:.0%} of the probabilities are exactly 0")

# %%
# How many digits have a probability above 0.

plot.support_histogram(p)

# %%
# How often the classifiers are right, against how sure they are.

figure, axes = plt.subplots(1, 3, figsize=(10, 4.6), layout="constrained")
for (name, each), ax in zip(p.items(), axes):
    plot.calibration(each, y_unseen, name=name, ax=ax)

# %%
# Where sparsemax hesitates between two digits or more, it names them.

several = (p["sparsemax"] > 0.2).sum(axis=1) > 1
figure, axes = plt.subplots(1, 6, figsize=(9, 2.3), layout="constrained")
for image, row, ax in zip(unseen[several], p["sparsemax"][several], axes):
    ax.imshow(image.reshape(8, 8), cmap="gray_r")
    ax.set_title(
        "\n".join(
            f"{digit}: {row[digit]:.2f}" for digit in (-row).argsort()[:3] if row[digit] > 0
        ),
        fontsize=9,
    )
    ax.set_axis_off()
