"""Pure decisions: who runs with whom, how, in which launches. Standard library and our value types only."""
