"""What coordinator, members and agents say to each other."""
