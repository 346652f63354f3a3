"""What only a GPU can show: no waiting inside a chunk, captured steps, memory given back."""

import pytest
import torch

pytestmark = pytest.mark.gpu
