"""A generator of Kaggle's size, rows of it, and the demo data, made once."""

import pytest

from dlrm.data import synthetic
from dlrm.data.synthetic.distributions import profiles
from dlrm.data.synthetic.generator import Generator, Recipe

KAGGLE = profiles()["kaggle"]


@pytest.fixture(scope="session")
def generator():
    """Makes a generator of rows, of Kaggle's columns unless others are given."""

    def make(rows, categorical=KAGGLE.categorical, dense=KAGGLE.dense, **options):
        return Generator(dense, categorical, Recipe(rows=rows, device="cpu", **options))

    return make


@pytest.fixture(scope="session")
def kaggle(generator):
    """A generator of the full Kaggle size."""
    return generator(KAGGLE.rows)


@pytest.fixture(scope="session")
def sample(kaggle):
    """A random sample of the full size, as many rows as the real sample has."""
    return kaggle.rows(0, 137_139)


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """The demo data set."""
    directory = tmp_path_factory.mktemp("synthetic") / "demo"
    synthetic.write_demo(directory)
    return directory
