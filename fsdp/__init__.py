"""What one rank does. Imports torch; imports no launcher: neither ray nor submitit nor launch/."""
