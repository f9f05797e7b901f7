"""Train ResNets from the shards that `prep` writes, and measure the loading."""
