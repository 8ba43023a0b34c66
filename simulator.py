"""The simulator: multi-turn tool-calling tasks in the four categories of BFCL, small enough to learn from scratch.

A task is a dialogue of user turns over seven stateful APIs. The golden calls say what should be done in each turn.

    base          every turn can be done as it is asked
    miss_param    one turn leaves a value out ([] is golden there), the next turn gives it
    miss_func     one turn needs a tool that is not offered yet ([] again), the next turn hands it over
    long_context  the same dialogue as base, but every result carries clutter around the wanted value

Departures from BFCL: the words come from a closed list of about 400 and numbers are small; the APIs are ours; every API
counts its accepted writes in `revision`, so doing the right thing twice is a wrong final state.

In order: words and slots, the APIs, what users may want (a plan of calls and three ways to say it), the task generator.

    python simulator.py        prints one task of each category with its golden replay
"""
import hashlib
import inspect
import json
import random
import re
from dataclasses import dataclass
from functools import partial
from typing import Callable, NamedTuple

from envs import CATEGORIES, MAX_CALLS, Call, Episode, Refused, Task, bind_arguments, fresh, make_tool
from run import program, read_flags

PARTS = {"train": range(0, 8), "validation": range(8, 9), "test": range(9, 10)}  # tenths of all scenarios, by hash


# ---- words and slots ----

PEOPLE = ("ann bob carl dora eric fay gus hana ian jill kurt lena max nora otto pam quin rosa sam tess uma vic walt "
          "zoe").split()
CITIES = ("paris rome oslo lima cairo delhi tokyo berlin madrid dublin lyon kyoto boston dallas milan prague quito "
          "riga seoul turin vienna zurich").split()
PAPERS = ("notes report budget letter essay recipe poem thesis invoice diary draft memo plan survey resume script "
          "outline summary review contract").split()
FOLDERS = "docs work home archive public shared trash backup school office".split()
STOCKS = "acme bolt cora dyna echo flux giga hexa iris juno kilo luna mega nova onyx polo".split()
TOPICS = ("printer lamp door heater phone screen carpet window keyboard camera elevator router garage kitchen roof "
          "pump mouse garden battery speaker cable desk chair piano").split()
TEXTS = ("hello thanks lunch welcome sorry goodbye yes no maybe later soon congratulations coffee dinner tomorrow "
         "tonight finished ready late early").split()
LEVELS = "low medium high urgent".split()
DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
WEATHER = "rain sun snow wind fog storm".split()
LABELS = "page row color shape batch zone grade shelf weight source rank label width author flag".split()
FILLERS = "red blue green round square north south old new light heavy first last wood metal".split()

ABOUT = {   # parameter -> its description in the schemas
    "amount": "How much or how many.", "bags": "Number of bags.", "booking": "Booking number.", "city": "City.",
    "code": "Lock code.", "day": "Day of the week.", "degrees": "Temperature.", "distance": "Distance.",
    "event": "Event number.", "file": "File name.", "folder": "Folder name.", "goal": "City to go to.",
    "guests": "Names of people.", "hour": "Hour.", "level": "low, medium, high or urgent.",
    "message": "Message number.", "nights": "Number of nights.", "number": "Phone number.", "on": "On or off.",
    "order": "Order number.", "person": "Name of a person.", "price": "Price.", "seats": "Number of seats.",
    "start": "City to start from.", "stock": "Name of a stock.", "text": "One word of text.",
    "ticket": "Ticket number.", "topic": "Topic."}


class Slot(NamedTuple):
    """A value that a user says. A slot is named like the parameter it fills, or after what it picks from."""
    noun: str           # what the value is called: "that ticket", "some ticket"
    choices: Callable   # API instances by name -> the values to choose from
    form: str = "{}"    # how the value is said


SLOTS = {
    "ticket": Slot("ticket", lambda world: list(world["Tickets"].tickets), "ticket {}"),
    "issue": Slot("topic", lambda world: [entry["topic"] for entry in world["Tickets"].tickets.values()], "the {}"),
    "message": Slot("message", lambda world: list(world["Messages"].inbox), "message {}"),
    "sender": Slot("person", lambda world: [entry["person"] for entry in world["Messages"].inbox.values()]),
    "order": Slot("order", lambda world: list(world["Trading"].orders), "order {}"),
    "held": Slot("stock", lambda world: [entry["stock"] for entry in world["Trading"].orders.values()]),
    "booking": Slot("booking", lambda world: list(world["Travel"].bookings), "booking {}"),
    "visited": Slot("city", lambda world: [entry["city"] for entry in world["Travel"].bookings.values()]),
    "event": Slot("event", lambda world: list(world["Calendar"].events), "event {}"),
    "meeting": Slot("topic", lambda world: [entry["topic"] for entry in world["Calendar"].events.values()], "the {}"),
    "file": Slot("file", lambda world: list(world["Files"].files), "file {}"),
    "other": Slot("file", lambda world: list(world["Files"].files), "file {}"),
}
SLOTS |= {name: Slot(noun, lambda world, pool=pool: pool, form) for name, noun, pool, form in (
        ("paper", "file", PAPERS, "file {}"), ("folder", "folder", FOLDERS, "folder {}"), ("text", "text", TEXTS, "{}"),
        ("guests", "guests", [[a, b] for a in PEOPLE for b in PEOPLE if a != b], "{}"),
        ("person", "person", PEOPLE, "{}"), ("city", "city", CITIES, "{}"), ("start", "city", CITIES, "{}"),
        ("goal", "city", CITIES, "{}"), ("stock", "stock", STOCKS, "{}"), ("topic", "topic", TOPICS, "the {}"),
        ("level", "level", LEVELS, "level {}"), ("day", "day", DAYS, "{}"), ("on", "mode", [True, False], "{}"),
        ("amount", "amount", range(1, 31), "{}"), ("price", "price", range(1, 61), "price {}"),
        ("number", "number", range(1, 61), "number {}"), ("code", "code", range(1, 61), "code {}"),
        ("hour", "hour", range(1, 25), "hour {}"),
        ("distance", "distance", range(1, 61), "distance {}"), ("degrees", "degrees", range(1, 31), "{} degrees"),
        ("nights", "nights", range(1, 15), "{} nights"), ("bags", "bags", range(1, 7), "{} bags"),
        ("seats", "seats", range(1, 7), "{} seats"))}   # a range allows arithmetic: "two more than 5"


# ---- the APIs ----

def tool(about, writes):
    """Marks a method as a tool. One that writes must change the state unless it raises Refused, also when repeated."""
    def mark(function):
        function.__doc__, function.writes = about, writes
        return function
    return mark


read, write = partial(tool, writes=False), partial(tool, writes=True)


class Api:
    """Plain attributes, plus `revision`, the number of writes accepted so far."""

    def __init__(self, initial):
        vars(self).update(fresh(initial), revision=0)


def get(entries, key):
    if key not in entries:
        raise Refused("no such entry")
    return entries[key]


def latest(entries, key, value):
    """Number of the newest entry that has `value` under `key`."""
    for number in reversed(entries):
        if entries[number][key] == value:
            return number
    raise Refused("nothing found")


def add(entries, **entry):
    number = max(entries, default=0) + 1
    entries[number] = entry
    return number


def draw_entries(rng, **pools):
    """3 to 5 numbered entries; their values are distinct draws from the pools."""
    size = rng.randint(3, 5)
    columns = [rng.sample(pool, size) if len(pool) >= size else rng.choices(pool, k=size) for pool in pools.values()]
    return {number: dict(zip(pools, row)) for number, row in zip(rng.sample(range(1, 50), size), zip(*columns))}


def draw_numbers(rng, names):
    return dict(zip(names, rng.choices(range(1, 61), k=len(names))))


class Files(Api):
    @staticmethod
    def draw(rng):
        return {"files": {name: {"text": [rng.choice(TEXTS)], "folder": rng.choice(FOLDERS), "size": rng.randint(1, 60),
                                 "code": 0} for name in rng.sample(PAPERS, 8)}}

    @write("Write a file, replacing what it held.")
    def write_file(self, file: str, text: str):
        old = self.files.get(file, {"folder": "home", "size": 1, "code": 0})
        self.files[file] = {**old, "text": [text]}

    @write("Add a line of text to a file.")
    def add_line(self, file: str, text: str):
        get(self.files, file)["text"].append(text)

    @write("Move a file to a folder.")
    def move_file(self, file: str, folder: str):
        get(self.files, file)["folder"] = folder

    @write("Lock a file with a code.")
    def lock_file(self, file: str, code: int):
        get(self.files, file)["code"] = code

    @read("Tell the folder that a file is in.")
    def get_folder(self, file: str):
        return {"folder": get(self.files, file)["folder"]}

    @read("Tell the size of a file.")
    def get_size(self, file: str):
        return {"size": get(self.files, file)["size"]}


class Tickets(Api):
    @staticmethod
    def draw(rng):
        return {"tickets": draw_entries(rng, topic=TOPICS, level=LEVELS, owner=PEOPLE, open=[True]),
                "on_duty": rng.choice(PEOPLE)}

    @write("Open a ticket about a topic.")
    def open_ticket(self, topic: str, level: str = "low"):
        return {"ticket": add(self.tickets, topic=topic, level=level, owner=self.on_duty, open=True)}

    @read("Find the newest ticket about a topic.")
    def find_ticket(self, topic: str):
        return {"ticket": latest(self.tickets, "topic", topic)}

    @read("Tell who works on a ticket.")
    def get_owner(self, ticket: int):
        return {"person": get(self.tickets, ticket)["owner"]}

    @write("Set the level of a ticket.")
    def set_level(self, ticket: int, level: str):
        get(self.tickets, ticket)["level"] = level

    @write("Give a ticket to a person.")
    def assign_ticket(self, ticket: int, person: str):
        get(self.tickets, ticket)["owner"] = person

    @write("Close a ticket.")
    def close_ticket(self, ticket: int):
        get(self.tickets, ticket)["open"] = False


class Messages(Api):
    @staticmethod
    def draw(rng):
        return {"inbox": draw_entries(rng, person=PEOPLE, text=TEXTS, pinned=[False]), "sent": {}, "called": [],
                "phones": draw_numbers(rng, PEOPLE)}

    @write("Send a text to a person.")
    def send_message(self, person: str, text: str):
        add(self.sent, person=person, text=text)

    @read("Find the newest message from a person.")
    def find_message(self, person: str):
        return {"message": latest(self.inbox, "person", person)}

    @write("Pin a message.")
    def pin_message(self, message: int):
        get(self.inbox, message)["pinned"] = True

    @read("Look up the phone number of a person.")
    def get_number(self, person: str):
        return {"number": get(self.phones, person)}

    @write("Call a phone number.")
    def call_number(self, number: int):
        self.called.append(number)


class Trading(Api):
    @staticmethod
    def draw(rng):
        return {"prices": draw_numbers(rng, STOCKS), "alerts": {}, "balance": rng.randint(1, 60),
                "orders": draw_entries(rng, stock=STOCKS, amount=range(1, 31), price=range(1, 61), open=[True])}

    @read("Tell the price of a stock.")
    def get_price(self, stock: str):
        return {"price": get(self.prices, stock)}

    @read("Find the newest order of a stock.")
    def find_order(self, stock: str):
        return {"order": latest(self.orders, "stock", stock)}

    @write("Order an amount of a stock at a price.")
    def place_order(self, stock: str, amount: int, price: int):
        return {"order": add(self.orders, stock=stock, amount=amount, price=price, open=True)}

    @write("Cancel an order.")
    def cancel_order(self, order: int):
        get(self.orders, order)["open"] = False

    @write("Ask for an alert when a stock reaches a price.")
    def set_alert(self, stock: str, price: int):
        self.alerts[stock] = price

    @write("Add an amount to the account.")
    def add_funds(self, amount: int):
        self.balance += amount


class Vehicle(Api):
    @staticmethod
    def draw(rng):
        return {"fuel": rng.randint(1, 60), "degrees": rng.randint(1, 30), "alarm": [0, False], "trip": 0,
                "place": rng.choice(CITIES), "distances": draw_numbers(rng, CITIES)}

    @read("Tell how much fuel the car has.")
    def get_fuel(self):
        return {"fuel": self.fuel}

    @write("Put an amount of fuel into the car.")
    def add_fuel(self, amount: int):
        self.fuel += amount

    @write("Set the temperature in the car.")
    def set_heat(self, degrees: float):
        self.degrees = degrees

    @write("Set the car alarm for an hour and switch it on or off.")
    def set_alarm(self, hour: int, on: bool = True):
        self.alarm = [hour, on]

    @read("Tell the distance to a city.")
    def get_distance(self, city: str):
        return {"distance": get(self.distances, city)}

    @write("Set the trip counter of the car to a distance.")
    def set_trip(self, distance: int):
        self.trip = distance

    @write("Drive the car to a city.")
    def drive_to(self, city: str):
        self.place = city


class Travel(Api):
    @staticmethod
    def draw(rng):
        return {"bookings": draw_entries(rng, city=CITIES, kind=["hotel"], size=range(1, 7), bags=[0], open=[True]),
                "weather": {city: rng.choice(WEATHER) for city in CITIES}}

    @write("Book a flight from one city to another.")
    def book_flight(self, start: str, goal: str, seats: int = 1):
        return {"booking": add(self.bookings, city=goal, kind=start, size=seats, bags=0, open=True)}

    @write("Book a hotel in a city for some nights.")
    def book_hotel(self, city: str, nights: int):
        return {"booking": add(self.bookings, city=city, kind="hotel", size=nights, bags=0, open=True)}

    @read("Find the newest booking for a city.")
    def find_booking(self, city: str):
        return {"booking": latest(self.bookings, "city", city)}

    @write("Set how many bags go with a booking.")
    def add_bags(self, booking: int, bags: int):
        get(self.bookings, booking)["bags"] = bags

    @write("Cancel a booking.")
    def cancel_booking(self, booking: int):
        get(self.bookings, booking)["open"] = False

    @read("Tell the weather in a city.")
    def get_weather(self, city: str):
        return {"weather": get(self.weather, city)}


class Calendar(Api):
    @staticmethod
    def draw(rng):
        return {"events": draw_entries(rng, topic=TOPICS, day=DAYS, hour=range(1, 25), guests=[[]])}

    @write("Put an event about a topic on a day.")
    def add_event(self, topic: str, day: str):
        return {"event": add(self.events, topic=topic, day=day, hour=0, guests=[])}

    @read("Find the newest event about a topic.")
    def find_event(self, topic: str):
        return {"event": latest(self.events, "topic", topic)}

    @read("Tell the day of an event.")
    def get_day(self, event: int):
        return {"day": get(self.events, event)["day"]}

    @write("Move an event to a day.")
    def move_event(self, event: int, day: str):
        get(self.events, event)["day"] = day

    @write("Set a reminder for an event at an hour.")
    def set_reminder(self, event: int, hour: int):
        get(self.events, event)["hour"] = hour

    @write("Invite people to an event.")
    def invite_guests(self, event: int, guests: list[str]):
        get(self.events, event)["guests"] = guests


APIS = (Files, Tickets, Messages, Trading, Vehicle, Travel, Calendar)


def list_tools():
    """{tool name: Tool} of all APIs. The parameter descriptions for the schemas come from ABOUT."""
    table = {}
    for api in APIS:
        for name, function in vars(api).items():
            if hasattr(function, "writes"):
                parameters = list(inspect.signature(function).parameters)[1:]
                lines = "".join(f"\n    {parameter}: {ABOUT[parameter]}" for parameter in parameters)
                function.__doc__ += "\n\nArgs:" + lines if lines else ""
                table[name] = make_tool(function, api.__name__, function.writes)
    return table


TABLE = list_tools()


# ---- tasks ----

@dataclass(frozen=True)
class SimulatorTask(Task):
    """A made task; `initial` is {API class name: its initial data}."""
    clutter: int = 0            # useless entries in every result

    def episode(self) -> "SimulatorEpisode":
        return SimulatorEpisode(self)


class SimulatorEpisode(Episode):
    """One run of a made task."""
    table = TABLE

    def start(self):
        return {api.__name__: api(self.task.initial[api.__name__]) for api in APIS}

    def present(self, result, call):
        """The result among clutter, if the task has any."""
        if not self.task.clutter:
            return result
        seed = f"{self.task.id.partition('@')[0]} {call}"   # the end of an id names arguments of make_tasks
        return json.dumps(add_clutter(json.loads(result), self.task.clutter, seed))


# ---- intents ----

class Intent(NamedTuple):
    """Something a user may want. Plan and templates are the two sides of it; the slots are what they share."""
    plan: list[tuple]       # (tool name, {parameter: slot, or key of an earlier result})
    slots: list[str]
    templates: tuple[str]


def intent(plan, *templates):
    """Read a plan like "find_ticket(topic=issue) -> ticket; close_ticket(ticket)"; a bare name stands for name=name."""
    steps, slots, results = [], {}, set()
    for name, inner, result in re.findall(r"(\w+)\(([^)]*)\)(?: -> (\w+))?", plan):
        steps.append((name, dict((part.split("=") * 2)[:2] for part in inner.split(", "))))
        slots.update((source, None) for source in steps[-1][1].values() if source not in results)
        results.add(result)
    return Intent(steps, list(slots), templates)


INTENTS = [
    intent("write_file(file=paper, text)", "write {text} into {paper}", "make {paper} say {text}",
           "{paper} should hold just {text}"),
    intent("add_line(file, text)", "add a line of {text} to {file}", "at the end of {file} add {text}",
           "{file} needs one more line saying {text}"),
    intent("move_file(file, folder)", "move {file} over to {folder}", "put {file} into {folder}",
           "{file} belongs into {folder}"),
    intent("lock_file(file, code)", "lock {file} with {code}", "use {code} to lock {file}",
           "protect {file} with {code}"),
    intent("get_folder(file)", "which folder is {file} in", "tell me the folder of {file}",
           "where do i keep {file}"),
    intent("get_folder(file=other) -> folder; move_file(file, folder)", "move {file} to the folder where {other} is",
           "put {file} into the same folder as {other}", "{file} should be kept where {other} is kept"),
    intent("get_size(file) -> size; lock_file(file, code=size)", "lock {file} with its size as the code",
           "protect {file} with a code equal to its size", "the size of {file} should be its lock code"),
    intent("open_ticket(topic)", "open a ticket about {topic}", "report a problem with {topic}",
           "{topic} is broken so open a ticket"),
    intent("open_ticket(topic, level)", "open a ticket of {level} about {topic}",
           "report {topic} as {level}", "{topic} is broken so open a ticket of {level}"),
    intent("find_ticket(topic=issue) -> ticket; close_ticket(ticket)", "close the ticket about {issue}",
           "{issue} works again so close its ticket", "find {issue} ticket and close it"),
    intent("find_ticket(topic=issue) -> ticket; set_level(ticket, level)", "set {issue} ticket to {level}",
           "the ticket about {issue} is now {level}", "give {issue} ticket a level of {level}"),
    intent("find_ticket(topic=issue) -> ticket; assign_ticket(ticket, person)", "give {issue} ticket to {person}",
           "{person} should work on the ticket about {issue}", "let {person} have {issue} ticket"),
    intent("close_ticket(ticket)", "close {ticket} because it is done", "{ticket} is solved so close it",
           "we are finished with {ticket} so close it"),
    intent("set_level(ticket, level)", "set the level of {ticket} to {level}", "{ticket} has become {level}",
           "change {ticket} over to {level}"),
    intent("assign_ticket(ticket, person)", "assign {ticket} to {person}", "{person} should work on {ticket}",
           "let {person} take care of {ticket}"),
    intent("get_owner(ticket) -> person; send_message(person, text)", "send {text} to the owner of {ticket}",
           "tell {text} to whoever works on {ticket}", "the owner of {ticket} should get a message of {text}"),
    intent("send_message(person, text)", "send {text} to {person}", "write {person} a message that says {text}",
           "let {person} know {text} by message"),
    intent("find_message(person=sender) -> message; pin_message(message)", "pin the message from {sender}",
           "the message that {sender} wrote should be pinned", "find the message of {sender} and pin it"),
    intent("pin_message(message)", "pin {message} to the top", "keep {message} pinned for me",
           "{message} should be pinned"),
    intent("get_number(person) -> number; call_number(number)", "call {person} on the phone",
           "look up the number of {person} and call it", "phone {person} right away"),
    intent("call_number(number)", "call up {number}", "dial {number} for me", "on my phone dial {number}"),
    intent("get_price(stock)", "what is the price of {stock}", "tell me how much {stock} costs today",
           "look up the price of {stock}"),
    intent("get_price(stock) -> price; place_order(stock, amount, price)", "buy {amount} of {stock} at its price",
           "order {amount} shares of {stock} at the price of today", "get me {amount} of {stock} at what it costs now"),
    intent("place_order(stock, amount, price)", "buy {amount} of {stock} at {price}",
           "at {price} get me {amount} of {stock}", "order {amount} shares of {stock} at {price}"),
    intent("find_order(stock=held) -> order; cancel_order(order)", "cancel my order of {held} stock",
           "i no longer want the {held} order", "find the order of {held} and cancel it"),
    intent("cancel_order(order)", "cancel {order} for me", "i no longer want {order}",
           "stop {order} from going through"),
    intent("set_alert(stock, price)", "set an alert for {stock} at {price}", "warn me when {stock} reaches {price}",
           "at {price} of {stock} i want an alert"),
    intent("add_funds(amount)", "add {amount} to my trading account", "put {amount} more into the account",
           "pay {amount} into my account"),
    intent("add_fuel(amount)", "put {amount} of fuel into the car", "fill {amount} of fuel into my car",
           "the car needs {amount} more of fuel"),
    intent("set_heat(degrees)", "heat the car to {degrees}", "set the car heater to {degrees}",
           "i want {degrees} in the car"),
    intent("set_alarm(hour)", "set the car alarm for {hour}", "the alarm of my car should start at {hour}",
           "arm the car at {hour}"),
    intent("set_alarm(hour, on)", "set the car alarm for {hour} and turn it {on}",
           "the car alarm of {hour} should be {on}", "turn the car alarm of {hour} to {on}"),
    intent("drive_to(city)", "drive the car to {city}", "take the car and go to {city}", "let us drive over to {city}"),
    intent("get_distance(city)", "how far is it to drive to {city}", "tell me the distance to {city}",
           "what is the distance to {city}"),
    intent("get_distance(city) -> distance; set_trip(distance)", "set the trip counter to the distance to {city}",
           "make the trip counter show how far {city} is", "the trip counter should have the distance of {city}"),
    intent("set_trip(distance)", "set the trip counter to {distance}", "make the trip counter show {distance}",
           "the trip counter should be {distance}"),
    intent("book_flight(start, goal)", "book a flight from {start} to {goal}", "i want to fly from {start} to {goal}",
           "get me to {goal} by plane from {start}"),
    intent("book_flight(start, goal, seats)", "book {seats} on a flight from {start} to {goal}",
           "fly me from {start} to {goal} with {seats}", "i need {seats} to fly to {goal} from {start}"),
    intent("book_hotel(city, nights)", "book a hotel in {city} for {nights}", "i will stay {nights} in a {city} hotel",
           "find me a hotel for {nights} in {city}"),
    intent("find_booking(city=visited) -> booking; cancel_booking(booking)", "cancel my booking for {visited}",
           "i am not going to {visited} so cancel it", "find the booking for {visited} and cancel it"),
    intent("find_booking(city=visited) -> booking; add_bags(booking, bags)", "put {bags} on the {visited} booking",
           "i bring {bags} on my trip to {visited}", "my booking for {visited} needs {bags}"),
    intent("add_bags(booking, bags)", "put {bags} on {booking}", "i bring {bags} with {booking}",
           "{booking} should have {bags}"),
    intent("cancel_booking(booking)", "cancel {booking} for me", "i do not need {booking} any more",
           "please call off {booking}"),
    intent("get_weather(city)", "how is the weather in {city}", "tell me the weather of {city}",
           "what weather do they have in {city}"),
    intent("add_event(topic, day)", "put an event about {topic} on {day}", "on {day} we meet about {topic}",
           "add {topic} to my calendar for {day}"),
    intent("find_event(topic=meeting) -> event; move_event(event, day)", "move {meeting} event to {day}",
           "the event about {meeting} will be on {day}", "let {meeting} event be on {day} instead"),
    intent("find_event(topic=meeting) -> event; invite_guests(event, guests)", "invite {guests} to {meeting} event",
           "{guests} should come to the event about {meeting}", "ask {guests} to join {meeting} event"),
    intent("move_event(event, day)", "move {event} to {day}", "{event} will be on {day}",
           "shift {event} over to {day}"),
    intent("set_reminder(event, hour)", "remind me of {event} at {hour}", "set a reminder for {event} at {hour}",
           "at {hour} remind me of {event}"),
    intent("get_day(event) -> day; add_event(topic, day)", "add an event about {topic} on the day of {event}",
           "on the same day as {event} we meet about {topic}", "put {topic} on the day that {event} has"),
]
SHORT = {size: [each for each in INTENTS if len(each.plan) <= size] for size in (1, 2)}   # longest plan -> intents


# ---- task generator ----

OPENINGS = ["", "", "hello , ", "listen , ", "now ", "here is a wish , "]
JOINS = [" and ", " then ", " and then ", " . also ", " . after that "]
MISSING = ["some {noun}", "the right {noun}"]
GIVEN = ["the {noun} i mean is {words}", "please use {words} for the {noun}", "take {words} as the {noun}",
         "sorry , the {noun} should be {words}"]
HANDED = ["the tool you need is ready now , go on", "you have a new tool now , try again",
          "i have added the missing tool for you", "now there is a tool that can do it"]


class Wish(NamedTuple):
    """One intent as a user words it; `lead` is what comes before it in the turn."""
    lead: str
    template: str
    texts: dict     # slot -> words


def spoken(wishes):
    """The text of one user turn."""
    return "".join(wish.lead + wish.template.format(**wish.texts) for wish in wishes)


def say(rng, value, arithmetic):
    """The words for a value; with `arithmetic`, now and then a small sum that the policy has to work out."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " and ".join(value)
    if not arithmetic or rng.random() < 0.85:
        return str(value)
    steps = [(1, "one"), (2, "two"), (3, "three")]
    ways = [f"{word} more than {value - step}" for step, word in steps if value >= step]
    ways += [f"{word} less than {value + step}" for step, word in steps if value + step <= 60]
    return rng.choice(ways + ([] if value % 2 else [f"double {value // 2}"] * 2))


def draw_wish(rng, chosen, lead, world, memory):
    """Fill the slots of the intent `chosen` and run its plan in `world`; returns (Wish, [Call]) and updates `memory`.

    `memory` holds what was last mentioned or found, by noun, so that a user may say "that ticket".
    """
    values, texts, nouns = {}, {}, {slot: SLOTS[slot].noun for slot in chosen.slots}
    for slot, noun in nouns.items():
        choices = SLOTS[slot].choices(world)
        twice = list(nouns.values()).count(noun) > 1
        if memory.get(noun) in choices and not twice and rng.random() < 0.3:
            values[slot], texts[slot] = memory[noun], f"the same {noun}" if noun.endswith("s") else f"that {noun}"
        else:
            if twice:   # two cities: two different ones
                choices = [choice for choice in choices if choice not in values.values()]
            values[slot] = rng.choice(choices)
            texts[slot] = SLOTS[slot].form.format(say(rng, values[slot], isinstance(choices, range)))
    for slot, noun in nouns.items():
        memory[noun] = None if list(nouns.values()).count(noun) > 1 else values[slot]
    calls = []
    for name, sources in chosen.plan:
        calls.append(Call(name, {parameter: values[source] for parameter, source in sources.items()}))
        found = TABLE[name].function(world[TABLE[name].owner], **fresh(calls[-1].arguments)) or {}
        values.update(found)
        memory.update(found)
    return Wish(lead, rng.choice(chosen.templates), texts), calls


def draw_scenario(rng, turns, calls):
    """Initial data, wishes per user turn, golden calls per user turn."""
    initial = {api.__name__: api.draw(rng) for api in APIS}
    world = {api.__name__: api(initial[api.__name__]) for api in APIS}
    wishes, golden, memory = [], [], {}
    for _ in range(rng.randint(*turns)):
        said, wanted, size = [], [], rng.randint(*calls)
        while len(wanted) < size:
            chosen = rng.choice(SHORT[min(2, size - len(wanted))])
            wish, done = draw_wish(rng, chosen, rng.choice(JOINS if said else OPENINGS), world, memory)
            said.append(wish)
            wanted += done
        wishes.append(said)
        golden.append(wanted)
    return initial, wishes, golden


def part_of(golden):
    """The part that a scenario belongs to: a hash of its golden calls, whose arguments hold what was looked up.

    None if a call is wanted twice: a user would not ask for that, and a policy may well know the result already.
    """
    calls = [json.dumps([name, bind_arguments(TABLE[name].parameters, arguments)], sort_keys=True)
             for turn in golden for name, arguments in turn]
    tenth = int.from_bytes(hashlib.sha256("\n".join(calls).encode()).digest()[:4], "big") % 10
    return next(part for part, tenths in PARTS.items() if tenth in tenths) if len(set(calls)) == len(calls) else None


def draw_tools(rng, needed, size):
    """`size` tool names in random order and one more; about half of the distractors are from the APIs needed."""
    others = [name for name in TABLE if name not in needed]
    rng.shuffle(others)
    owners = {TABLE[name].owner for name in needed}
    near = [name for name in others if TABLE[name].owner in owners][:(size - len(needed) + 1) // 2]
    spread = near + [name for name in others if name not in near]
    names = list(needed) + spread[:size - len(needed)]
    rng.shuffle(names)
    return names + [rng.choice(spread[size - len(needed):])]


def make_variant(rng, category, wishes, golden, names):
    """(turns, golden, offered, withheld) of one category. `names` ends with a distractor that only miss_func offers."""
    texts, golden, offered, withheld = [spoken(said) for said in wishes], list(golden), names[:-1], {}
    if category == "miss_param":
        turn, i, slot = rng.choice([
            (t, i, slot) for t, said in enumerate(wishes) for i, wish in enumerate(said)
            for slot, words in wish.texts.items() if not words.startswith(("that ", "the same "))])
        said, noun, words = list(wishes[turn]), SLOTS[slot].noun, wishes[turn][i].texts[slot]
        said[i] = said[i]._replace(texts={**said[i].texts, slot: rng.choice(MISSING).format(noun=noun)})
        texts[turn:turn + 1] = spoken(said), rng.choice(GIVEN).format(noun=noun, words=words)
        golden.insert(turn, [])
    elif category == "miss_func":
        first = {}      # tool name -> first turn that needs it
        for t, wanted in enumerate(golden):
            for call in wanted:
                first.setdefault(call.name, t)
        name, turn = rng.choice(list(first.items()))
        texts.insert(turn + 1, rng.choice(HANDED))
        golden.insert(turn, [])
        offered, withheld = [names[-1] if other == name else other for other in offered], {turn + 1: [name]}
    return texts, golden, offered, withheld


def draw_clutter(rng, size):
    return [{rng.choice(LABELS): rng.choice([rng.choice(FILLERS), rng.randint(0, 60)])} for _ in range(size)]


def add_clutter(result, size, seed):
    """`result` between `size` useless entries, the same ones for the same seed."""
    rng, result = random.Random(seed), result if isinstance(result, dict) else {"result": result}
    before = rng.randint(0, size)
    return {"before": draw_clutter(rng, before), **result, "after": draw_clutter(rng, size - before)}


def regime_of(**chosen):
    """What of these arguments of make_tasks differs from its defaults, for the end of an id: "@calls=1-1,tools=6"."""
    usual = inspect.signature(make_tasks).parameters
    texts = {name: "-".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
             for name, value in chosen.items() if value != usual[name].default}
    return "@" * bool(texts) + ",".join(f"{name}={text}" for name, text in texts.items())


def check_range(name, pair, top):
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(type(value) is int for value in pair)
            and 1 <= pair[0] <= pair[1] <= top):
        raise ValueError(f"{name} must be (min, max) with 1 <= min <= max <= {top}, not {pair!r}")


def make_tasks(n, seed, part="train", categories=CATEGORIES, turns=(1, 2), calls=(1, 2), tools=8,
               clutter=6) -> list[Task]:
    """`n` tasks of one part, the same ones for the same arguments, on any machine.

    The categories take turns; consecutive tasks are the variants of one scenario. No scenario is in two parts, whatever
    the seeds. Tasks with the same id are the same: it names every argument that is not the default.

    Args:
        part: train, validation or test (8 : 1 : 1 of all scenarios).
        turns: least and most user turns of base; the miss_ variants have one turn more.
        calls: least and most golden calls in a turn.
        tools: how many tools are offered at the start.
        clutter: how many useless entries long_context adds to every result.
    Raises ValueError if an argument makes no sense.
    """
    if type(n) is not int or n < 0:
        raise ValueError(f"n must be a whole number >= 0, not {n!r}")
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, not {part!r}")
    if isinstance(categories, str) or not categories or len(set(categories) & set(CATEGORIES)) < len(categories):
        raise ValueError(f"categories must be some of {', '.join(CATEGORIES)}, not {categories!r}")
    check_range("turns", turns, 20)
    check_range("calls", calls, MAX_CALLS)
    if type(tools) is not int or not turns[1] * calls[1] <= tools < len(TABLE):
        raise ValueError(f"tools must be in [turns * calls = {turns[1] * calls[1]}, {len(TABLE) - 1}], not {tools!r}")
    if type(clutter) is not int or clutter < 0:
        raise ValueError(f"clutter must be a whole number >= 0, not {clutter!r}")
    rng, tasks = random.Random(f"{part} {seed}"), []
    chosen = {"categories": tuple(categories), "turns": tuple(turns), "calls": tuple(calls), "tools": tools}
    regime, cluttered = regime_of(**chosen), regime_of(**chosen, clutter=clutter)
    while len(tasks) < n:
        initial, wishes, golden = draw_scenario(rng, turns, calls)
        if part_of(golden) != part:
            continue
        scenario = f"sim-{part}-{seed}-{len(tasks) // len(categories):07d}"
        needed = dict.fromkeys(call.name for wanted in golden for call in wanted)
        names = draw_tools(rng, needed, tools)
        for category in categories[:n - len(tasks)]:
            texts, wanted, offered, withheld = make_variant(rng, category, wishes, golden, names)
            useless, ending = (clutter, cluttered) if category == "long_context" else (0, regime)
            tasks.append(SimulatorTask(f"{scenario}-{category}{ending}", category, scenario + regime, texts, wanted,
                                       offered, withheld, initial, clutter=useless))
    return tasks


@dataclass
class Options:
    """There are none."""


def main(argv=None):
    read_flags(Options, argv)
    for task in make_tasks(4, seed=0):
        print(f"\n{task.id}   tools: {', '.join(task.offered)}")
        episode = task.episode()
        for text, wanted in zip(task.turns, task.golden):
            print("  user:", text)
            for call in wanted:
                print("    ", call.name, call.arguments, "->", *episode.step([call]))
            message = episode.next_turn()
            if message and "tools" in message:
                print("  handed over:", *(schema["function"]["name"] for schema in message["tools"]))


if __name__ == "__main__":
    program(main)
