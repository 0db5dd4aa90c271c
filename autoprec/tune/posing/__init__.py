"""The planner's problem of a task: what each choice harms and costs."""
