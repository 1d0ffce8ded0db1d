"""From a lease to a scored group."""
