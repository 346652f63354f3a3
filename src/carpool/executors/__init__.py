"""Running a plan: one training loop (`driver.py`), and who gets the device when (`interleaved.py`)."""
