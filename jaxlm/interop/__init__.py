"""Published models: what their files hold, by their names, and the same parameters by ours."""
