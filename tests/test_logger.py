import logging
import subprocess
import sys

from twinkle_core import get_logger


def test_a_script_is_heard_without_setting_up_logging_and_said_once_where_it_did() -> None:
    script = "from twinkle_core import get_logger\nget_logger().info('one')\nget_logger().info('two')\nget_logger().debug('three')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    said = [line.split(" ", 2)[2] for line in done.stderr.splitlines()]
    assert said == ["INFO one", "INFO two"]
    script = "import logging\nlogging.basicConfig(format='mine %(message)s')\n" + script
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["mine one", "mine two"]


def test_it_is_a_logger_of_the_standard_library() -> None:
    assert get_logger() is logging.getLogger("twinkle_core")
