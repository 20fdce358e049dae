"""Colours as light, and what people who lack a kind of cones see of them."""

import numpy as np

# Of linear RGB, without red, green and blue cones: Machado, Oliveira and Fernandes 2009, severity 1.
SEEN = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "all": np.eye(3),
}


def linear(rgb):
    """Linear RGB of sRGB from 0 to 1."""
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
