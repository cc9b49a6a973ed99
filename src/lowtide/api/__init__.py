"""The verbs a user calls, each a page of orchestration."""
