"""The functions a user calls: fit, plan, compile, estimate, measure, max_batch. Each joins the packages below it."""
