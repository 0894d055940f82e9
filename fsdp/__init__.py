"""What one rank does. Knows torch; knows no launcher: never imports ray, submitit or launch/."""
