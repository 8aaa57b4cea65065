"""What every room of the studio uses: its errors, and numbers as words."""
