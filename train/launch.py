"""`train fit`: train, or look ahead before it."""

from __future__ import annotations

from train.config import FitConfig
from train.estimate import look_ahead
from train.fit import fit
from train.ladder import find_batch_size
from train.run import Say
from train.smoke import try_chain


def launch(config: FitConfig, say: Say) -> None:
    """Do what the options ask for: train, try it on a few images, or look ahead.

    Args:
        config: Options.
        say: Takes the lines of the result; only called on rank 0.
    """
    if config.dry_run:
        look_ahead(config, say)
    elif config.find_batch_size:
        find_batch_size(config, say)
    elif config.smoke:
        try_chain(config, say)
    else:
        fit(config, say)
