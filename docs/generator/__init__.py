"""What the site makes itself: pages of the maps, tables of measurements, the API reference. No Sphinx in here but for `docstrings`."""
