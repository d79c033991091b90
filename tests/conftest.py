"""Types are checked at run time in the tests: the hook must be there before hla_jax is imported."""

from collections.abc import Iterator

import jax
import jaxtyping
import pytest

jaxtyping.install_import_hook("hla_jax", "helpers.typechecked")


@pytest.fixture
def x64() -> Iterator[None]:
    """Runs a test with 64-bit types on."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def no_type_checks() -> Iterator[None]:
    """Runs a test as a user would: the library's own error is met first, not the type checker's."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
