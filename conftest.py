"""Load the plugin from this checkout, whether or not the package is installed."""

pytest_plugins = ["perfsuite.plugin"]
collect_ignore = ["perfsuite/suite"]
"""Another way to test_perf; its cases would come twice."""
