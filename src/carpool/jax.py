"""For JAX: `carpool.jax.Model`, populations, and the keys that a job's steps are given. Importing this imports JAX."""

from carpool.adapters.jax.keys import step_key
from carpool.adapters.jax.model import Model
from carpool.adapters.jax.population import Population, population

__all__ = ["Model", "Population", "population", "step_key"]
