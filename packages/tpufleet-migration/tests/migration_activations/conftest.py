"""The tiny model and devices of the tests of extraction."""

from tests.activations.conftest import (  # noqa: F401
    model_folder,
    restore_sigterm,
    small_devices,
    small_disk,
)
from tests.activations.object_store_servers import amazon, cloud, google  # noqa: F401
