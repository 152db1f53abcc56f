"""Load the plugin from this checkout, whether or not the package is installed."""

pytest_plugins = ["perfsuite.plugin"]
