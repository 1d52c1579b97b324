"""What a script says: one logger for the package and its users."""

from __future__ import annotations

import logging

NAME = "twinkle_core"


def get_logger(name: str = NAME) -> logging.Logger:
    """The logger `name`, which shows INFO on standard error as 'time level message', unless the script set up logging itself.

    Example: `get_logger().info('step 3')`.
    """
    logger = logging.getLogger(name)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return logger
