"""The version of jaxlm: the one place in which it is set. setup.cfg and launch/release.sh read this line."""

__version__ = "0.1.0"
