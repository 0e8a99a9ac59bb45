"""What all tests of training share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def without_curves(request):
    """Drawing the losses takes longer than most runs of these tests; a module with DRAWS_CURVES looks at the file."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "DRAWS_CURVES", False):
            patch.setattr("dcformer.training.final._plot", lambda *_: None)
        yield
