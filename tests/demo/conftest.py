"""The page of a model that answers questions, served once."""

import pytest
from tiny_models import ANSWERS

from dcformer.demo import serve_page
from dcformer.demo.page import import_gradio
from dcformer.loading import load_model


@pytest.fixture(scope="session")
def gradio():
    """Imported only by the process that runs its tests, since that takes seconds."""
    return import_gradio()


@pytest.fixture(scope="session")
def bundled():
    return load_model(ANSWERS)


@pytest.fixture(scope="session")
def server(bundled):
    serving = serve_page(bundled)
    yield serving
    serving.close(verbose=False)
