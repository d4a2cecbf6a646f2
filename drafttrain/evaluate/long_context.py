"""Long prompts of our own writing, composed from few lines of text instead of stored: logs, minutes, tables, code.
Each document hides facts that its question asks for; the same prompts come out on every machine."""

import random
from collections.abc import Callable

CATEGORY = "long_context"
NAMES = ("Amara", "Bruno", "Chidi", "Daria", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Katya", "Leif")
SERVICES = ("gateway", "accounts", "catalogue", "basket", "checkout", "invoices", "search", "mailer", "media", "stock")
Draw = random.Random


def long_prompts() -> list[dict]:
    """Ten rows in Spec-Bench form {"id", "category", "turns": [document and question]}, 5,000 to 20,000 characters."""
    rows = []
    for number, build in enumerate(BUILDERS, start=1):
        name = f"{CATEGORY}-{number:02d}"
        rows.append({"id": name, "category": CATEGORY, "turns": [build(random.Random(name))]})
    return rows


def _clock(minutes: float) -> str:
    seconds = round(minutes * 60)
    return f"{seconds // 3600 % 24:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def service_log(draw: Draw) -> str:
    """An hour of a shop's log with one failed release in it."""
    lines, minute = [], 540.0
    for i in range(110):
        minute += draw.randrange(5, 60) / 60
        service, request = draw.choice(SERVICES), draw.randrange(10_000, 99_999)
        slow = service in ("checkout", "basket") and 58 < i <= 96
        took = draw.randrange(900, 4000) if slow else draw.randrange(8, 240)
        status = draw.choice((200, 200, 504)) if slow else draw.choice((200, 200, 200, 201, 204, 304, 404))
        level = "ERROR" if status == 504 else "INFO"
        lines.append(f"{_clock(minute)} {level} {service} req={request} status={status} took={took}ms")
        if i == 58:
            lines.append(f"{_clock(minute + 0.05)} INFO deploy accounts 2.31.0 -> 2.32.0 by Goran: session cache off")
        if i == 96:
            lines.append(f"{_clock(minute + 0.05)} INFO deploy accounts 2.32.0 -> 2.31.0 by Hana: roll back")
    return (
        "This is the log of our shop from nine o'clock on.\n\n" + "\n".join(lines) + "\n\n"
        "Customers complained about the checkout. When did it begin, which services were affected, what is the likely "
        "cause, and did the roll back help? Quote the lines that you rely on, then write three sentences for the "
        "status page."
    )


TOPICS = (
    "the move of the archive to the basement",
    "the new booking form",
    "the noise from the building site",
    "the open day in autumn",
    "the contract with the printing house",
    "the broken ventilation in the reading room",
    "the request for longer opening hours",
    "the training for volunteers",
)
REMARKS = (
    "{a} reports on {topic}. The costs are {sum} euros above the estimate, mainly because of the second quotation.",
    "On {topic} there is nothing new; {a} has written twice without an answer. {b} knows somebody there and calls.",
    "{a} would like to postpone {topic} until after the holidays. {b} is against it, since the permit expires in June.",
    "A long discussion of {topic}. {a} points out that two thirds of the visitors come by bus, {b} doubts the figure.",
    "{b} thanks {a} for the work on {topic}. The feedback was good, apart from the signs, which nobody could find.",
    "{a} asks who is responsible for {topic}. Nobody is. {b} would take it over if the budget grew by {sum} euros.",
)
DECISIONS = (
    "Decided: {a} obtains a second offer for {topic} by the next meeting.",
    "Decided without a vote: {a} and {b} draft a letter about {topic}.",
    "Decided with one vote against: {topic} gets {sum} euros from the reserve.",
    "No decision on {topic}; it stays on the agenda.",
)


def minutes(draw: Draw) -> str:
    """Six meetings of a library's board; tasks are given, forgotten and taken over."""
    parts = []
    for number in range(1, 7):
        absent = draw.choice(NAMES)
        parts.append(f"## Meeting {number}, {4 + 5 * number % 23} {('March', 'April', 'May')[(number - 1) // 2]}")
        parts.append(f"Absent: {absent}. The minutes of the last meeting are accepted.")
        for item in range(1, 7):
            a, b = draw.choice(NAMES), draw.choice(NAMES)
            b = b if b != a else "the chair"
            facts = {"a": a, "b": b, "topic": draw.choice(TOPICS), "sum": 50 * draw.randrange(3, 60)}
            parts.append(f"{item}. {draw.choice(REMARKS).format(**facts)} {draw.choice(DECISIONS).format(**facts)}")
    return (
        "\n\n".join(parts) + "\n\n---\n\nThese are the minutes of our board. Write an overview for a new member: for "
        "each topic the state after the last meeting, the money that was granted, and who still has something to do. "
        "End with the topics on which the minutes contradict each other."
    )


def configuration(draw: Draw) -> str:
    """A deployment listing of ten services in which two settings do not fit the rules above it."""
    parts = ["services:"]
    for i, service in enumerate(SERVICES):
        replicas, memory = draw.randrange(2, 7), 128 * draw.randrange(2, 9)
        timeout = 45 if service == "catalogue" else draw.choice((5, 10, 15))
        port = 8107 if service == "media" else 8100 + i
        parts += [
            f"  {service}:",
            f"    image: registry.example.org/shop/{service}:{draw.randrange(1, 5)}.{draw.randrange(0, 40)}.0",
            f"    replicas: {replicas}",
            f"    port: {port}",
            "    resources:",
            f"      requests: {{cpu: {100 * draw.randrange(1, 6)}m, memory: {memory}Mi}}",
            f"      limits: {{cpu: {500 * draw.randrange(1, 5)}m, memory: {2 * memory}Mi}}",
            "    environment:",
            f"      LOG_LEVEL: {draw.choice(('info', 'info', 'warning'))}",
            f"      DATABASE_URL: postgres://{service}@db-{draw.randrange(1, 4)}.internal:5432/{service}",
            f"      UPSTREAM: http://{draw.choice(SERVICES)}.internal:80",
            f"      TIMEOUT_SECONDS: {timeout}",
            f"      RETRIES: {draw.randrange(1, 4)}",
            f"      FEATURES: {', '.join(draw.choice(('new-prices', 'dark-mode', 'audit', 'bulk')) for _ in range(2))}",
            f"    health: {{path: /ready, interval: {draw.choice((5, 10))}s, failures: {draw.randrange(2, 5)}}}",
        ]
    return (
        "Our rules: every service has its own port; no timeout is above 30 seconds; limits are twice the requests in "
        "memory; log levels are info or warning.\n\n```yaml\n" + "\n".join(parts) + "\n```\n\n"
        "Check the listing against the rules and name every violation with the service and the line. Then print the "
        "corrected entries of these services in full, and a table of all services with replicas, port and memory limit."
    )


COMPLAINTS = (
    "Since the update I cannot log in on {device}. The page stays white after I enter the code.",
    "I was charged twice for {month}. Please send the money back to the same card.",
    "The export for {month} has no header row any more, so our import script stops.",
    "Your app drains the battery of {device}. It was fine until {month}.",
    "I would like to change the owner of our workspace, but the button is grey.",
    "Notifications arrive an hour late on {device}, and some never.",
    "Could you add a way to sort tags? We have more than two hundred since {month}.",
    "The invoice of {month} shows our old address although we changed it in the settings.",
)
REPLIES = (
    "Thank you for the report. Could you tell us the version that is shown under Help?",
    "We could reproduce it and passed it on to the developers.",
    "This is solved in the version that was published this morning. Please update and try again.",
    "I am sorry about that. I have corrected it on our side; it may take a day until you see it.",
    "At the moment this is not possible. I added your vote to the request.",
)
DEVICES = ("an older Android phone", "my tablet", "two different laptops", "the office computers", "a new iPhone")
MONTHS = ("January", "February", "March", "April", "May", "June")


def tickets(draw: Draw) -> str:
    """Thirty support tickets with a few answers each."""
    parts = []
    for i in range(30):
        said = draw.choice(COMPLAINTS).format(device=draw.choice(DEVICES), month=draw.choice(MONTHS))
        answers = [f"Support: {draw.choice(REPLIES)}" for _ in range(draw.randrange(1, 3))]
        last = draw.choice(("Customer: Works now, thanks!", "Customer: Still the same.", "Customer: no answer"))
        plan, stars = draw.choice(("free", "team", "business")), draw.randrange(1, 6)
        head = f"#{3100 + 7 * i} | {draw.choice(NAMES)} | plan: {plan} | rating: {stars}"
        parts.append("\n".join([head, f"Customer: {said}", *answers, last]))
    return (
        "\n\n".join(parts)
        + "\n\n---\nGroup these tickets by problem. For each group give the number of tickets, their "
        "ids, how many are unsolved, and one sentence that describes the problem. Then say which two groups should be "
        "tackled first, taking plan and rating into account."
    )


def orders(draw: Draw) -> str:
    """A table of orders with one row whose total is wrong."""
    products = {"chair": 89, "desk": 240, "lamp": 35, "shelf": 120, "rug": 75, "mirror": 60}
    lines = ["order,date,customer,product,quantity,unit_price,total,shipped"]
    for i in range(115):
        product, quantity = draw.choice(tuple(products)), draw.randrange(1, 9)
        total = quantity * products[product] + (100 if i == 71 else 0)
        day = f"2024-0{1 + i // 40}-{1 + i % 40 * 28 // 40:02d}"
        shipped = draw.choice(("yes", "yes", "yes", "no"))
        row = (7000 + i, day, draw.choice(NAMES), product, quantity, products[product], total, shipped)
        lines.append(",".join(map(str, row)))
    return (
        "\n".join(lines)
        + "\n\nOne total in this table is not quantity times unit price. Find the order and correct it. "
        "Then list all orders from January that were not shipped, and describe in a short paragraph what the customers "
        "bought most."
    )


HANDBOOK = (
    ("Working hours", "The core time is from {n} to 15 o'clock.", "Whoever works on a Saturday gets {m} percent more."),
    ("Travel", "Trains are second class below {n} hours.", "A hotel may cost up to {m} euros a night."),
    ("Equipment", "A laptop is replaced after {n} years.", "Losses are reported within {m} hours."),
    ("Holidays", "There are {m} days of leave a year.", "Up to {n} days can be carried over until March."),
    ("Illness", "Please tell your team before {n} o'clock.", "A certificate is needed after {n} days."),
    ("Training", "Everybody has {n} days a year for courses.", "Courses above {m} euros need the head's consent."),
    ("Visitors", "Visitors wear a badge and are met at the door.", "Groups of more than {n} are announced in advance."),
    ("Security", "Passwords have at least {m} characters.", "Screens are locked after {n} minutes."),
    ("Expenses", "Receipts are handed in within {m} days.", "Meals are paid up to {n} euros without a receipt."),
    ("Parental leave", "It is announced {n} weeks ahead.", "Part-time work is possible for {m} months."),
)
PHRASES = (
    "Exceptions are decided by the head of the department in writing.",
    "The rule applies to all sites and also to people on fixed-term contracts.",
    "If two rules contradict each other, the one that is better for the employee counts.",
    "Interns and apprentices ask their supervisor, who keeps a note of the answer.",
    "Details and forms can be found on the internal pages under the same heading.",
    "The works council was heard and agreed, with the wish to review the rule after two years.",
    "In case of doubt, ask before rather than after; nobody was ever blamed for a question.",
)


def handbook(draw: Draw) -> str:
    """A staff handbook of ten chapters in two editions; the second changes some numbers."""
    parts = []
    for edition in (2022, 2024):
        parts.append(f"# Staff handbook, edition {edition}")
        for number, (title, *rules) in enumerate(HANDBOOK, start=1):
            facts = {"n": draw.randrange(6, 11), "m": draw.randrange(12, 30)}
            body = [rule.format(**facts) for rule in rules] + [draw.choice(PHRASES) for _ in range(4)]
            parts.append(f"## {number}. {title}\n\n" + " ".join(body))
    return (
        "\n\n".join(parts) + "\n\n---\n\nAn employee asks: what changed between the two editions? Answer with a table "
        "of chapter, old rule and new rule, only where the rules differ, and mark with a star what got better for her."
    )


CHANGES = (
    "`{name}` accepts a list as well as a single value",
    "`{name}` raises an error for negative sizes instead of returning nothing",
    "the default of `{name}` is now {number}",
    "`{name}` is deprecated and will be removed in the next major version",
    "`{name}` was removed; use `{other}` instead",
    "`{name}` is about {number} percent faster for large inputs",
    "mended: `{name}` lost the last element when the input had an odd length",
    "the documentation of `{name}` has an example",
)
FUNCTIONS = ("read_table", "write_table", "join_rows", "split_by", "resample", "pivot", "describe", "sort_rows", "cast")


def changelog(draw: Draw) -> str:
    """The change log of a library over twenty versions."""
    parts = []
    for i in range(22):
        major, minor = divmod(i, 8)
        parts.append(f"## {3 + major}.{minor}.0 (2023-{1 + i // 2:02d}-{5 + 10 * (i % 2):02d})")
        for _ in range(draw.randrange(4, 8)):
            facts = {"name": draw.choice(FUNCTIONS), "other": draw.choice(FUNCTIONS), "number": draw.randrange(5, 90)}
            parts.append(f"- {draw.choice(CHANGES).format(**facts)} (#{draw.randrange(400, 4000)})")
    return (
        "\n".join(parts) + "\n\nWe use version 3.5.0 with read_table, pivot and resample, and want to move to the "
        "newest version. List every change that concerns these three functions, in order and with its version, tell us "
        "which ones can break our code, and write a short plan for the upgrade."
    )


CHATTER = (
    "has anybody seen the key for the van?",
    "it was on the hook this morning, {b} had it last I think",
    "the delivery for {place} is two boxes short again",
    "called them, they say it left complete. {b}, can you check the photo?",
    "can somebody swap the shift on {day} with me? dentist",
    "I can take {day}, but only until two",
    "the freezer in {place} shows minus eleven, should be minus eighteen",
    "the technician comes on {day} between eight and twelve. who opens?",
    "I open, but then {b} has to do the market alone",
    "fine with me",
    "please write the batch number on the list, we had three without it last week",
    "sorry, that was me. it is done",
    "we need {n} more crates for {place}, the green ones",
    "there are {n} behind the ramp, take those",
    "the customer from {place} wants to pay by invoice, is that ok?",
    "ask {b}, I would say yes up to {n} hundred",
)
PLACES = ("the harbour shop", "the hospital kitchen", "Weaver Street", "the north depot", "the school canteen")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


def channel(draw: Draw) -> str:
    """Two days of a delivery team's chat."""
    lines, minute = [], 360.0
    for _ in range(115):
        minute += draw.randrange(1, 14)
        facts = {"b": draw.choice(NAMES), "place": draw.choice(PLACES), "day": draw.choice(DAYS)}
        text = draw.choice(CHATTER).format(n=draw.randrange(2, 15), **facts)
        lines.append(f"[{_clock(minute)[:5]}] {draw.choice(NAMES)}: {text}")
    return (
        "\n".join(lines) + "\n\nI was away while this was written. Tell me what I have to know: open problems, who "
        "works when, what was promised to customers, and questions that nobody answered. Then draft one message that I "
        "can post in the channel to settle the three most urgent points."
    )


def readings(draw: Draw) -> str:
    """Readings of six greenhouse sensors every half hour, one of which sticks."""
    sensors = ("north", "south", "east", "west", "door", "roof")
    lines = ["| time | " + " | ".join(sensors) + " |", "|---" * (len(sensors) + 1) + "|"]
    stuck = 0.0
    for i in range(84):
        warmth = 14 + 9 * (1 - abs(i % 48 - 28) / 28)
        values = [warmth + draw.randrange(-12, 13) / 10 + offset for offset in (0, 2, 0.5, 1, -2, 3)]
        stuck = values[3] if i <= 40 else stuck
        values[3] = stuck
        lines.append(f"| {_clock(30 * i)[:5]} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    return (
        "Temperatures in our greenhouse in degrees Celsius, from Sunday midnight on.\n\n" + "\n".join(lines) + "\n\n"
        "Describe the course of the temperature on both days. One sensor stopped working: which, and since when? "
        "Write a report of about 200 words for the gardener, with the warmest and the coldest reading of each sensor."
    )


FIELDS = ("name", "email", "street", "city", "phone", "language", "birthday", "company")
CODE = """def update_{field}_{kind}(store, {kind}_id, value, user):
    record = store.get("{kind}", {kind}_id)
    if record is None:
        raise LookupError("no {kind} " + str({kind}_id))
    if not user.may("edit", "{kind}"):
        raise PermissionError(user.name)
    if len(value) > {limit}:
        raise ValueError("{field} is too long")
    before = record["{field}"]
    record["{field}"] = value{call}
    store.put("{kind}", {kind}_id, record)
    store.log(user.name, "{kind}.{field}", before, value)
    return record
"""


def source_file(draw: Draw) -> str:
    """A module of near copies, one of which differs in what it stores."""
    parts = []
    for kind in ("customer", "supplier", "employee"):
        for field in FIELDS:
            call = ".strip()" if (kind, field) != ("supplier", "phone") else ""
            parts.append(CODE.format(field=field, kind=kind, limit=10 * draw.randrange(2, 20), call=call))
    return (
        "```python\n" + "\n\n".join(parts) + "```\n\nThese functions were copied from each other. Replace them by one "
        "function and a table of limits, keep the behaviour, and print the new module in full. One of the functions "
        "does something different from the others: name it and say how your version treats the case."
    )


BUILDERS: tuple[Callable[[Draw], str], ...] = (
    service_log,
    minutes,
    configuration,
    tickets,
    orders,
    handbook,
    changelog,
    channel,
    readings,
    source_file,
)
