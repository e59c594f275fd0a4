"""What wrappers and optimizers do when the ranks of their job change (`membership.job.Participant`)."""
