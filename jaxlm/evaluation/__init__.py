"""Commands of `jaxlm.evaluate`: one module each, and what they share."""
