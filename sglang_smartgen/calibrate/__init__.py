"""Made once per model, offline: the selectors' artifacts and the profile of block importance."""
