"""A plan is measured against fp32, and formats are taken back where rounding adds up."""
