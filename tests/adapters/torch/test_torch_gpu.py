"""What only a GPU can show: no waiting inside a chunk, captured steps, memory given back."""

import pytest

pytestmark = pytest.mark.gpu
