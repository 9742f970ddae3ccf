"""The embedded small world: cities and countries of GeoNames (CC BY 4.0)."""
