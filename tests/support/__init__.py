"""`python -m support`: every model class of transformers, tiny and random, under both functions."""
