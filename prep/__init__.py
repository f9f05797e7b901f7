"""Pack ImageNet once into tar shards, every image checked on the way."""
