"""Where every tensor rests: device maps resolved by whole names, and the plan that says it in bytes."""
