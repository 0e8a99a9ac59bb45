"""The page of the bundled model, served once."""

import pytest

from dcformer.demo import serve_page
from dcformer.loading import load_model


@pytest.fixture(scope="session")
def bundled():
    return load_model("dcformer-tiny")


@pytest.fixture(scope="session")
def server(bundled):
    serving = serve_page(bundled)
    yield serving
    serving.close()
